"""`precision-cast`: what prepare-input casts to float8 is for linears that take it as they would have cast it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.compiler.observe.running_module import within
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.styles.float8.recipes import recipe_of

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.diagnostics.diagnostic import Span
    from parallelizer.styles.application import Application

CODE = "precision-cast"


def float8_inputs(state: Compilation) -> Iterator[Diagnostic]:
    """Every module with `cast: float8` has linears in float8, all of them with one scale for a tensor."""
    by_place: dict[Span, list[Application]] = {}
    for a in state.applications:
        if a.slot == "io" and a.options.get("cast") == "float8":
            by_place.setdefault(a.spans.get("cast", a.rule.span), []).append(a)
    linears = [a for a in state.applications if a.slot == "precision"]
    for span, modules in by_place.items():
        for module in modules:
            inside = [a for a in linears if within(a.module, module.module)]
            found = _finding(module.module or "the root", inside, span)
            if found is not None:
                yield found
                break


def _finding(where: str, inside: list[Application], span: Span) -> Diagnostic | None:
    if not inside:
        return Diagnostic(
            CODE,
            f"no linear in {where} is in float8, so that its input cannot be",
            span,
            "put the linears that take the input in float8, or remove `cast`",
        )
    other = next((a for a in inside if recipe_of(a) != "tensorwise"), None)
    if other is not None:
        return Diagnostic(
            CODE,
            f"{other.module} is in float8 by the recipe {recipe_of(other)}, and an input that is cast once has one scale",
            span,
            f"use the recipe tensorwise for all linears in {where}, or remove `cast`",
        )
    if len({a.options.get("emulate") for a in inside}) > 1:
        return Diagnostic(
            CODE,
            f"some linears in {where} are emulated and some are not, and they would share an input",
            span,
            "write the same `emulate` for all of them, or remove `cast`",
        )
    return None
