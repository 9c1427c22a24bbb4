"""The section of a page about pipeline stages: what each holds, and who computes what when."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from parallelizer.report.html import schedule
from parallelizer.report.html.markup import Markup, join
from parallelizer.report.html.table import table
from parallelizer.report.rows.messages import HEADS, message_rows
from parallelizer.report.rows.schedules import rows_beside
from parallelizer.report.rows.stages import bubble, stage_rows
from parallelizer.simulate.record.stage_forms import CutTraffic
from parallelizer.styles.application import Program


def section(program: Program, model: nn.Module, cuts: Sequence[CutTraffic] = ()) -> Markup:
    """The stages, what they send to each other if that is known, the timeline of the schedule, and the other schedules beside
    it.
    """
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
    others = rows_beside(stages.pipeline, stages.ranks)
    caption = "What each stage holds and receives"
    sent = [row.cells for row in message_rows(program, cuts)]
    ways = [HEADS[0], *(f"#{name}" for name in HEADS[1:])]
    messages = (
        [table("What two ranks of stages that follow each other send in a step", ways, sent)] if sent else []
    )
    return join(table(caption, heads, rows), *messages, schedule.section(bubble(program), others))
