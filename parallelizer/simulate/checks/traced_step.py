"""A program with one step of it that was traced, as checks look at it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from parallelizer.compiler.observe.module_calls import Calls, observe
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.diagnostics.units import size
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import folded_name
from parallelizer.language.workload import Workload
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.trace import Trace
from parallelizer.styles.application import Application, Program
from parallelizer.styles.conversions import Conversion

SMALL = 1 << 20
"""Bytes of an all-gather below which its latency is most of its time."""


@dataclass(frozen=True)
class Traced:
    """What checks of a traced step look at. `workload` is what it was fed; `optimizer` has the optimizer's config, which is
    written at `optimizer_span`.
    """

    program: Program
    model: nn.Module
    trace: Trace
    workload: Workload
    optimizer: Mapping[str, object] = field(default_factory=dict)
    optimizer_span: Span | None = None

    @cached_property
    def calls(self) -> Calls | None:
        """What the model's modules take and return; None for a model that does not run on meta."""
        return observe(self.model, self.workload, self.trace.folded)

    def entries(self, phase: str, axis: str, module: str, *kinds: str) -> list[Collective]:
        """The collectives of one module in one phase on one axis."""
        return [
            e
            for e in self.trace.ledger
            if (e.phase, e.axis, e.module) == (phase, axis, module) and e.kind in kinds
        ]

    def fsdp_gathers(self) -> list[Collective]:
        """FSDP's all-gathers, each under the unit that it is for."""
        units, axis = {a.module for a in self.program.of_slot("fsdp")}, folded_name(self.program.mesh)
        every = (e for e in self.trace.ledger if e.kind == "all_gather" and e.axis == axis)
        return [e for e in every if e.module in units]


def written(conversion: Conversion) -> Span:
    """Where the layout of a conversion is written, or the rule if it is a default."""
    application = conversion.application
    return application.spans.get("output" if conversion.leaves else "input") or application.rule.span


def modules_text(applications: Iterable[Application]) -> str:
    """Modules as people read them: few globs, or how many there are."""
    globs = fold_paths(dict.fromkeys(a.module for a in applications))
    shown = ", ".join(g or "the root" for g in globs[:2])
    return shown if len(globs) <= 2 else f"{shown} and {len(globs) - 2} more"


def sent_text(calls: Sequence[Collective]) -> str:
    """`4 collectives a step send 8.0 MiB`."""
    return (
        f"{len(calls):,} collective{'' if len(calls) == 1 else 's'} a step send{'s' if len(calls) == 1 else ''} "
        + size(sum(e.wire_bytes for e in calls))
    )
