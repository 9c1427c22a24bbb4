"""Checks the degree of ulysses-ring: it distributes heads over this many ranks, which must divide the axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic, Related

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.diagnostics.diagnostic import Span


def ulysses_degree(state: Compilation) -> Iterator[Diagnostic]:
    """`ulysses_degree` must divide the ranks, and stand beside a method that has one. Told once for each place."""
    told: set[Span | None] = set()
    for a in state.applications:
        degree = a.options.get("ulysses_degree") if a.slot == "attention" else None
        if degree is None:
            continue
        span, axis = a.spans.get("ulysses_degree", a.rule.span), a.axes[0]
        method, ranks = a.options.get("method", "all-gather"), state.mesh.sizes[axis]
        if span in told:
            continue
        told.add(span)
        if method not in ("ulysses-ring", "auto"):
            yield Diagnostic(
                "ulysses-degree",
                f"ulysses_degree={degree} needs `method: ulysses-ring`, and the method is {method}",
                span,
                "write `method: ulysses-ring`, or remove the option",
            )
        elif degree < 1 or ranks % degree:
            where = state.mesh.spans.get(axis)
            yield Diagnostic(
                "ulysses-degree",
                f"ulysses_degree={degree} does not divide {axis}={ranks}",
                span,
                f"it can be {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}",
                related=(Related(where, f"{axis}={ranks} is set here"),) if where else (),
            )
