"""Rules that only apply to axes of size 1. One plan serves many meshes, so the rules of its files share one
line of output. A rule of a preset or of the command line was written for this mesh, and gets a note of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.plan import AXES, DATA_AXES
from parallelizer.language.styles import STYLES

if TYPE_CHECKING:
    from parallelizer.language.plan import Rule, StyleUse
    from parallelizer.styles.application import Program


def idle_rules(program: Program) -> Iterator[Diagnostic]:
    """Notes on rules that do nothing at all, because every axis that they stand on has size 1. `stage` in a plan is not
    counted: it says where a cut may be, and most meshes cut nowhere.
    """
    busy = {id(application.rule) for application in program}
    shadowed = {d.span for d in program.diagnostics if d.code == "shadowed-rule"}
    shared: dict[str, list[Rule]] = {}
    rules = program.plan.rules
    for at, rule in enumerate(rules):
        in_plan = at < len(rules) - program.plan.added
        axes = {a for use in rule.uses if not (in_plan and use.style == "stage") for a in _axes(use)}
        if id(rule) in busy or rule.span in shadowed or rule.optional or not axes:
            continue
        if any(program.mesh.sizes[axis] > 1 for axis in axes):
            continue
        sizes = ", ".join(f"{a}=1" for a in AXES if a in axes)
        if in_plan:
            shared.setdefault(sizes, []).append(rule)
        else:
            yield _note(f"{_shown(rule)} has no effect on this mesh: {sizes}", rule)
    styles = {use.style for some in shared.values() for rule in some for use in rule.uses}
    if styles - USUAL - {"stage"}:
        parts = [f"{_listed(rules)} ({sizes})" for sizes, rules in shared.items()]
        yield Diagnostic(
            "idle-rule", f"these rules have no effect on this mesh: {'; '.join(parts)}", severity="note"
        )


USUAL = frozenset({"fsdp", "context-parallel"})
"""Styles whose rules stand in every plan, and wait for a mesh that has their axes."""


def _note(message: str, rule: Rule) -> Diagnostic:
    help_text = "no change is needed if these axes are meant to be 1"
    return Diagnostic("idle-rule", message, rule.span, help_text, "note")


def _shown(rule: Rule) -> str:
    return f"`{rule.key}`" if rule.key else 'the rule of the root (`""`)'


def _listed(rules: Sequence[Rule]) -> str:
    more = f" and {len(rules) - 1} more" if len(rules) > 1 else ""
    return _shown(rules[0]) + more


def _axes(use: StyleUse) -> tuple[str, ...]:
    """The axes that a style stands on; none for one that works without any."""
    declared = STYLES[use.style]
    if use.style == "fsdp":
        return DATA_AXES  # without them its mixed precision may hold, and then it is applied
    written = use.options.get("axis")
    axes = {written.value if written else declared.axis, *_named(use.options)} - {None}
    return tuple(a for a in AXES if a in axes)


def _named(options: Mapping[str, object]) -> set[str]:
    """The axes that placements of `params` name themselves."""
    params = getattr(options.get("params"), "value", None)
    return {axis for by_axis in params.values() for axis in by_axis if axis} if params else set()
