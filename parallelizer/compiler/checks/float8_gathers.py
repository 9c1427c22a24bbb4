"""`precision-gather`: what fsdp is to gather in float8 has scales that fit, and units that can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.plan import full_name
from parallelizer.styles.tied_parameters import tied_names

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.diagnostics.diagnostic import Span
    from parallelizer.styles.application import Application

CODE = "precision-gather"


def float8_gathers(state: Compilation) -> Iterator[Diagnostic]:
    """Every rule with `gather: float8` gathers something in float8, by scales of whole weights."""
    by_place: dict[Span, list[Application]] = {}
    for unit in state.applications:
        if unit.slot == "fsdp" and unit.options.get("gather") == "float8":
            by_place.setdefault(unit.spans.get("gather", unit.rule.span), []).append(unit)
    recipes = {
        full_name(a.module, "weight"): a.options.get("recipe", "tensorwise")
        for a in state.applications
        if a.slot == "precision"
    }
    for span, units in by_place.items():
        found = next(_findings(state, units, recipes, span), None)
        if found is not None:
            yield found


def _findings(
    state: Compilation, units: list[Application], recipes: dict[str, str], span: Span
) -> Iterator[Diagnostic]:
    gathered = {
        full_name(unit.module, n): unit for unit in units for n in unit.params if n not in unit.reasons
    }
    shared = [names for names in tied_names(state.model) if any(name in gathered for name in names)]
    tied = [names for names in shared if any(name in recipes for name in names)]
    if tied:
        yield Diagnostic(
            CODE,
            f"{tied[0][0]} is shared with {', '.join(tied[0][1:])}, and only a weight of one module can be gathered in float8"
            f"{_more(tied)}",
            span,
            "leave it out of float8, or remove `gather`",
        )
    weights = [name for name in gathered if name in recipes]
    if not weights:
        yield Diagnostic(
            CODE,
            f"no linear in {units[0].module or 'the root'} is in float8, so that nothing can be gathered in float8",
            span,
            "put linears of the unit in float8, or remove `gather`",
        )
    rowwise = [name for name in weights if recipes[name] != "tensorwise"]
    if rowwise:
        yield Diagnostic(
            CODE,
            f"{rowwise[0]} is in float8 by the recipe {recipes[rowwise[0]]}, which scales it once for each of two products"
            f"{_more(rowwise)}: one gather cannot serve both",
            span,
            "use the recipe tensorwise there, or remove `gather`",
        )
    for unit in units:
        kept = unit.options.get("reshard_after_forward")
        if kept is not None and not isinstance(kept, bool):
            yield Diagnostic(
                CODE,
                f"reshard_after_forward={kept} keeps shards of what was gathered, which FSDP cannot for float8",
                span,
                "write reshard_after_forward: true or false, or remove `gather`",
            )
        if unit.options.get("cpu_offload"):
            yield Diagnostic(
                CODE,
                "shards in host memory are copied to the device in their own dtype, and cannot be gathered in float8",
                span,
                "remove `cpu_offload` or `gather`",
            )


def _more(names: Sequence[object]) -> str:
    return f" ({len(names) - 1} more like it)" if len(names) > 1 else ""
