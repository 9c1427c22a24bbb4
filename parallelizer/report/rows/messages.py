"""The rows of the table of messages: what each stage sends to its neighbours in a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parallelizer.diagnostics.units import size
from parallelizer.simulate.record.stage_forms import CutTraffic
from parallelizer.styles.application import Program

HEADS = ("what", "from stage", "to stage", "from pp rank", "to pp rank", "messages", "of", "sent")
"""The heads of the columns of `MessageRow.cells`. All but the first are numbers."""


@dataclass(frozen=True)
class MessageRow:
    """The messages of a step from one stage to another, `activations` or `gradients`, of one rank at each end; `ranks` are those
    on `pp`. Between stages of one rank nothing is sent.
    """

    kind: str
    stages: tuple[int, int]
    ranks: tuple[int, int]
    count: int
    bytes: int

    @property
    def sent_bytes(self) -> int:
        """The bytes of all messages."""
        return self.count * self.bytes

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, a cell for each of `HEADS`."""
        ends = map(str, (*self.stages, *self.ranks))
        return self.kind, *ends, f"{self.count:,}", size(self.bytes), size(self.sent_bytes)

    def as_json(self) -> dict[str, Any]:
        """One entry of the documented form."""
        return {
            "kind": self.kind,
            "from_stage": self.stages[0],
            "to_stage": self.stages[1],
            "from_pp_rank": self.ranks[0],
            "to_pp_rank": self.ranks[1],
            "count": self.count,
            "message_bytes": self.bytes,
            "sent_bytes": self.sent_bytes,
        }


def message_rows(program: Program, cuts: Iterable[CutTraffic]) -> list[MessageRow]:
    """A row for each direction between two stages that messages take, activations first."""
    stages = program.require_stages()
    ranks = {stage: rank for rank in range(stages.ranks) for stage in stages.on_rank(rank)}
    rows = []
    for cut in cuts:
        below, above = cut.stage - 1, cut.stage
        if ranks[below] != ranks[above]:
            up, down = (ranks[below], ranks[above]), (ranks[above], ranks[below])
            rows.append(MessageRow("activations", (below, above), up, cut.messages, cut.activation_bytes))
            if cut.gradient_bytes:
                rows.append(MessageRow("gradients", (above, below), down, cut.messages, cut.gradient_bytes))
    return sorted(rows, key=lambda row: (row.kind, row.stages))
