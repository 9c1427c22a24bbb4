"""A program with one step of it, as lints look at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from parallelizer.calls import Calls
from parallelizer.diagnostics import Span
from parallelizer.program import Program
from parallelizer.simulate.ledger import Entry
from parallelizer.simulate.trace import Trace


@dataclass(frozen=True)
class Traced:
    """What lints look at. `calls` is None for a model that does not run on meta; `optimizer` has the
    optimizer's config."""

    program: Program
    model: nn.Module
    trace: Trace
    calls: Calls | None = None
    accumulate: int = 1
    optimizer: Mapping[str, object] = field(default_factory=dict)
    optimizer_span: Span | None = None
    hardware: Mapping[str, object] = field(default_factory=dict)

    def entries(self, phase: str, axis: str, module: str, *kinds: str) -> list[Entry]:
        """The collectives of one module in one phase on one axis."""
        return [
            e
            for e in self.trace.ledger
            if (e.phase, e.axis, e.module) == (phase, axis, module) and e.kind in kinds
        ]
