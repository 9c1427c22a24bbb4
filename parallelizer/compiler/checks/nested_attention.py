"""`context-parallel` on a module and on a module inside it: an attention call would be converted twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic, Related

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation


def nested_attention(state: Compilation) -> Iterator[Diagnostic]:
    """One finding for each pair of rules."""
    attention = {a.module: a for a in state.applications if a.slot == "attention"}
    told = set()
    for path, inner in attention.items():
        around = next(
            (o for p, o in attention.items() if p != path and (not p or path.startswith(f"{p}."))), None
        )
        if around is None or (pair := (inner.rule.span, around.rule.span)) in told:
            continue
        told.add(pair)
        yield Diagnostic(
            "nested-attention",
            f"{path} is inside {around.module or 'the root'}, and both have `context-parallel`",
            inner.rule.span,
            "keep it on the inner module, or on the outer one for every attention call inside it",
            related=(Related(around.rule.span, f"this rule is for {around.module or 'the root'}"),),
        )
