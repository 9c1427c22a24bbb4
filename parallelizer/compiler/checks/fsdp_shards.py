"""Parameters of a plan that `fully_shard` does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import DATA_AXES, full_name

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.diagnostics.diagnostic import Span
    from parallelizer.styles.application import Application


def fsdp_shards(state: Compilation) -> Iterator[Diagnostic]:
    """Units run a forward of their own, `reshard_after_forward` as a number is for data axes only, which it must
    divide, and what is to be sharded off dimension 0 has a dimension that divides.
    """
    for application in state.applications:
        if application.slot == "fsdp":
            yield from _container(state, application)
            yield from _reshard(state, application)
    yield from _uneven(state)


def _container(state: Compilation, application: Application) -> Iterator[Diagnostic]:
    module = state.modules[application.module]
    if type(module).forward is nn.Module.forward:
        yield Diagnostic(
            "style-module",
            f"{application.module} ({type(module).__name__}) has no forward, so fsdp cannot gather its parameters",
            application.rule.span,
            f"write the rule for the modules inside: `{application.module}.*`",
        )


def _reshard(state: Compilation, application: Application) -> Iterator[Diagnostic]:
    number = application.options.get("reshard_after_forward")
    if number is None or isinstance(number, bool):
        return
    span, ranks = application.spans["reshard_after_forward"], state.mesh.size(*state.mesh.fsdp_axes)
    if not 1 < number < ranks or ranks % number:
        legal = ["true", "false", *(str(n) for n in range(2, ranks) if ranks % n == 0)]
        yield Diagnostic(
            "reshard-size",
            f"reshard_after_forward={number} is not the size of a smaller group of the {ranks} ranks",
            span,
            f"it can be {', '.join(legal)}",
        )
        return
    # Torch makes the smaller groups from this rank's own data ranks, as if there were no others.
    other = [f"{a}={n}" for a, n in state.mesh.sizes.items() if n > 1 and a not in DATA_AXES]
    if other:
        yield Diagnostic(
            "reshard-size",
            f"reshard_after_forward={number} cannot be used with {', '.join(other)}",
            span,
            "a number needs a mesh with only data axes above 1: write true or false",
        )


def _uneven(state: Compilation) -> Iterator[Diagnostic]:
    """Parameters that were to be sharded on a dimension of their own, of which none divides; once for each rule."""
    by_rule: dict[Span, list[tuple[Application, str]]] = {}
    for application in state.applications:
        for name, reason in application.reasons.items():
            if reason.startswith("no dimension"):
                by_rule.setdefault(application.rule.span, []).append((application, name))
    for whole in by_rule.values():
        application, _ = whole[0]
        names = fold_paths([full_name(a.module, name) for a, name in whole])
        ranks = state.mesh.size(*state.mesh.fsdp_axes)
        yield Diagnostic(
            "fsdp-uneven",
            f"{', '.join(names[:3])} {'has' if len(whole) == 1 else 'have'} no dimension left that {ranks} ranks divide, "
            "so every rank holds the whole parameter",
            application.spans.get("shard_dim", application.rule.span),
            "leave shard_dim at 0, where torch pads, or set min_size to keep small parameters whole",
            "warning",
        )
