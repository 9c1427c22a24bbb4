"""Checks that kernels for float8 can multiply the groups of stacked experts, with the scales of whole rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.plan import EXPERT, Placement, full_name
from parallelizer.styles.application import Application, tensor_placements
from parallelizer.styles.float8.recipes import DIVISOR
from parallelizer.styles.placed_parameters import ShardParams

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.diagnostics.diagnostic import Span


def float8_experts(state: Compilation) -> Iterator[Diagnostic]:
    """Forward sees local tensors, of sizes that kernels take. Groups of rows have any size, since they are filled up."""
    by_rule: dict[Span, list[Application]] = {}
    for application in state.applications:
        if application.stacked:
            by_rule.setdefault(application.rule.span, []).append(application)
    for applications in by_rule.values():
        yield from _global(state, applications)
        yield from _sizes(state, applications)


def _global(state: Compilation, applications: list[Application]) -> Iterator[Diagnostic]:
    """Grouped products are replaced for plain tensors: those of DTensors would have been laid out before."""
    of_dtensors = {
        a.module
        for a in state.applications
        if isinstance(a.act, ShardParams) and a.act.params and a.act.layouts is not None
    }
    found = [a for a in applications if a.module in of_dtensors]
    if found:
        yield Diagnostic(
            "precision-experts",
            f"the forward of {found[0].module} runs on DTensors, and float8 multiplies groups of local tensors{_more(found)}",
            found[0].rule.span,
            "remove `input`, `output` and `local: false` from the rule that splits its parameters, and lay tensors out around "
            "the module, with prepare-io; or leave these experts out of float8",
        )


def _sizes(state: Compilation, applications: list[Application]) -> Iterator[Diagnostic]:
    """The features of a rank's part of each expert are multiples of what the kernels ask for."""
    placements = tensor_placements(state.applications)
    local = [
        (a, name, _local(state, a, name, placements))
        for a in applications
        if not a.options.get("emulate")
        for name in a.stacked
    ]
    wrong = [(a, name, shape) for a, name, shape in local if any(size % DIVISOR for size in shape)]
    if wrong:
        application, name, shape = wrong[0]
        more = f" ({len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
        yield Diagnostic(
            "precision-size",
            f"an expert of {full_name(application.module, name)} is {'x'.join(map(str, shape))} on a rank: float8 kernels need "
            f"multiples of {DIVISOR}{more}",
            application.rule.span,
            "leave these modules out of the glob, or write `emulate: true`",
        )


def _local(
    state: Compilation,
    application: Application,
    name: str,
    placements: Mapping[str, Mapping[str, Placement]],
) -> tuple[int, ...]:
    """The shape of a rank's part of one expert."""
    path = full_name(application.module, name)
    shape = list(state.parameters[path].shape)
    split = placements.get(path, {})
    experts = next((p.dim for axis, p in split.items() if axis == EXPERT and p.dim is not None), 0)
    for axis, placement in split.items():
        if placement.dim is not None and axis != EXPERT:
            shape[placement.dim] //= state.mesh.sizes[axis]
    return tuple(size for dim, size in enumerate(shape) if dim != experts)


def _more(applications: list[Application]) -> str:
    return f" ({len(applications) - 1} more like it)" if len(applications) > 1 else ""
