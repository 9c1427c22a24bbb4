"""Checks that all modules that share a parameter give it the same placement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.language.plan import full_name
from parallelizer.styles.tied_parameters import tied_names

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.styles.application import Application


def tied_parameters(state: Compilation) -> Iterator[Diagnostic]:
    """Each name of a shared parameter has the same placements and packing, and lies in the same fsdp unit."""
    placed = {
        full_name(a.module, n): (a, n) for a in state.applications if a.slot == "params" for n in a.params
    }
    units = [a for a in state.applications if a.slot == "fsdp"]
    for first, *others in tied_names(state.model):
        for other in others:
            yield from _same_placement(first, other, placed)
            yield from _same_unit(first, other, units)


def _same_placement(a: str, b: str, placed: dict[str, tuple[Application, str]]) -> Iterator[Diagnostic]:
    if _placement(a, placed) == _placement(b, placed):
        return
    rules = [placed[n][0].rule for n in (b, a) if n in placed]
    yield Diagnostic(
        "tied-parameters",
        f"{b} is the same parameter as {a}, but the plan places it differently",
        rules[0].span,
        "use styles that place it in the same way, or do not tie the modules",
        related=tuple(Related(r.span, f"this rule places {a}") for r in rules[1:]),
    )


def _placement(name: str, placed: dict[str, tuple[Application, str]]) -> object:
    if name not in placed:
        return None
    application, relative = placed[name]
    return dict(application.params[relative]), application.packed.get(relative)


def _same_unit(a: str, b: str, units: list[Application]) -> Iterator[Diagnostic]:
    first, second = _unit(a, units), _unit(b, units)
    if first is second:
        return
    rules = [u.rule for u in (second, first) if u is not None]
    yield Diagnostic(
        "tied-parameters",
        f"{b} is the same parameter as {a}, but fsdp gathers it in two units",
        rules[0].span,
        "put both into the unit of a module around them",
        related=tuple(
            Related(r.span, f"the rule of the unit with {a}") for r in rules[1:] if r is not rules[0]
        ),
    )


def _unit(name: str, units: list[Application]) -> Application | None:
    """The innermost unit around a parameter: units come innermost first."""
    return next((u for u in units if u.module == "" or name.startswith(f"{u.module}.")), None)
