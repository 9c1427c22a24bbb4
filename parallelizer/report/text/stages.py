"""The stages of a pipeline as a table, and the picture of its schedule."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text
from torch import nn

from parallelizer.report.rows.messages import HEADS, message_rows
from parallelizer.report.rows.schedules import rows_beside
from parallelizer.report.rows.stages import stage_rows, summary
from parallelizer.report.text import schedule, tables
from parallelizer.report.text.tables import Column
from parallelizer.simulate.record.stage_forms import CutTraffic
from parallelizer.styles.application import Program


def write(program: Program, model: nn.Module, screen: Console) -> None:
    """Print the stages of a program; nothing for one without. `model` is as it was compiled."""
    if program.stages is None:
        return
    columns = [
        Column("stage", right=True),
        Column("pp rank", right=True),
        Column("modules", wrap="path"),
        Column("parameters", right=True, spare=1),
        Column("receives", wrap="path"),
        Column("microbatches\nheld", right=True),
    ]
    rows = [
        [
            str(row.stage),
            str(row.rank),
            "\n".join(row.paths),
            f"{row.parameters:,}",
            "\n".join(row.receives) or "the batch",
            str(row.live),
        ]
        for row in stage_rows(program, model)
    ]
    tables.write(screen, Text.assemble(("stages", "bold"), f"  {summary(program)}"), columns, rows)
    screen.print()
    schedule.write(program.stages.order, screen)
    screen.print()
    pipeline, ranks = program.stages.pipeline, program.stages.ranks
    schedule.write_table(rows_beside(pipeline, ranks), screen, ranks, pipeline.microbatches or 1)
    screen.print()


def write_messages(program: Program, cuts: Iterable[CutTraffic], screen: Console) -> None:
    """Print what stages send to each other in a step; nothing for a program without stages."""
    if program.stages is None:
        return
    # The table above has the ranks of the stages, and each message is its share of what is sent.
    spare = {"from pp rank": 2, "to pp rank": 2, "of": 1}
    columns = [Column(name, right=at > 0, spare=spare.get(name, 0)) for at, name in enumerate(HEADS)]
    rows = [[*row.cells] for row in message_rows(program, cuts)]
    head = Text.assemble(
        ("messages", "bold"), " of one step between two ranks of stages that follow each other"
    )
    tables.write(screen, head, columns, rows)
    screen.print()
