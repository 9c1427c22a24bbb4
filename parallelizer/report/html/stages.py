"""The section of a page about pipeline stages: what each holds, and who computes what when."""

from __future__ import annotations

from torch import nn

from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.report.html import schedule
from parallelizer.report.html.markup import Markup, join
from parallelizer.report.html.table import table
from parallelizer.report.rows.schedules import schedule_rows
from parallelizer.report.rows.stages import bubble, stage_rows
from parallelizer.styles.application import Program


def section(program: Program, model: nn.Module) -> Markup:
    """The stages, the timeline of the schedule, and the other schedules beside it."""
    heads = ("#stage", "#pp rank", "modules", "#parameters", "receives", "#microbatches held")
    rows = [
        (
            str(row.stage),
            str(row.rank),
            ", ".join(row.paths),
            f"{row.parameters:,}",
            ", ".join(row.receives) or "the batch",
            str(row.live),
        )
        for row in stage_rows(program, model)
    ]
    stages = program.require_stages()
    pipelines = [Pipeline(name, stages_per_rank=_several(name, stages.pipeline)) for name in SCHEDULES]
    others = schedule_rows(stages.ranks, stages.pipeline.microbatches or 1, pipelines)
    caption = "What each stage holds and receives"
    return join(table(caption, heads, rows), schedule.section(bubble(program), others))


def _several(name: str, pipeline: Pipeline) -> int | None:
    """The stages on a rank that a schedule is compared with: as many as there are, where it takes several."""
    return pipeline.stages_per_rank if name == pipeline.schedule else None
