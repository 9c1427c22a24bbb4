"""What `fully_shard` cannot do with the parameters that a plan gives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics import Diagnostic
from parallelizer.plan import full_name

if TYPE_CHECKING:
    from parallelizer.compiler import Application, Compilation


def fsdp_shards(state: Compilation) -> Iterator[Diagnostic]:
    """`reshard_after_forward` as a number is refused by torch for parameters that are tensor-sharded, and must divide the axis."""
    sharded = {
        full_name(a.module, name) for a in state.applications if a.slot == "params" for name in a.params
    }
    for application in state.applications:
        if application.slot == "fsdp":
            yield from _reshard(state, application, sharded)


def _reshard(state: Compilation, application: Application, sharded: set[str]) -> Iterator[Diagnostic]:
    number = application.options.get("reshard_after_forward")
    if number is None or isinstance(number, bool):
        return
    use = next(u for u in application.rule.uses if u.style == "fsdp")
    option = use.options.get("reshard_after_forward")
    span = option.span if option else use.span
    ranks = state.mesh.size(*state.mesh.fsdp_axes)
    if not 1 < number < ranks or ranks % number:
        legal = [str(n) for n in range(2, ranks) if ranks % n == 0]
        yield Diagnostic("reshard-size", f"reshard_after_forward={number} is no smaller group of {ranks} ranks", span,
                         f"true, false{', ' if legal else ''}{', '.join(legal)} are possible")
        return
    for name in application.params:
        full = full_name(application.module, name)
        if full in sharded:
            yield Diagnostic("reshard-size", f"reshard_after_forward={number}, and {full} is a DTensor on a tensor axis", span,
                             "torch refuses a number there: write true or false")
            return
