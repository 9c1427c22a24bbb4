"""The rows of the tables of collectives: what one rank sends in a step, by phase, axis and kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from parallelizer.simulate.record.ledger import Collective


@dataclass
class CollectiveRow:
    """The collectives of one phase, axis and kind. `ahead` counts those that FSDP issues before they are needed,
    `rules` counts them by key, file and line of the rule behind them, `dtypes` by what they send.
    """

    phase: str
    axis: str
    kind: str
    count: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    ahead: int = 0
    ahead_bytes: int = 0
    rules: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """One entry of `collectives` in the documented form."""
        return {
            "phase": self.phase,
            "axis": self.axis,
            "kind": self.kind,
            "count": self.count,
            "payload_bytes": self.payload_bytes,
            "wire_bytes": self.wire_bytes,
        }


def collective_rows(ledger: Iterable[Collective]) -> list[CollectiveRow]:
    """Rows in the order of their first collectives."""
    rows: dict[tuple[str, str, str], CollectiveRow] = {}
    for e in ledger:
        row = rows.setdefault((e.phase, e.axis, e.kind), CollectiveRow(e.phase, e.axis, e.kind))
        row.count += 1
        row.dtypes[e.dtype] += 1
        row.payload_bytes += e.payload_bytes
        row.wire_bytes += e.wire_bytes
        if e.overlapped:
            row.ahead += 1
            row.ahead_bytes += e.wire_bytes
        if e.rule:
            row.rules[e.rule] += 1
    return list(rows.values())
