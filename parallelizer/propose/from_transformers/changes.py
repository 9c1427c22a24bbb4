"""What a written plan says otherwise than the plan that transformers' entries come to now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from parallelizer.compiler.compilation import Compilation
from parallelizer.compiler.match import match
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.plan import Mesh, Plan, Rule, StyleUse, full_name
from parallelizer.propose.from_transformers.proposal import Proposal, plan_globs
from parallelizer.propose.plan_text import PlanLine
from parallelizer.styles.application import Slot

COMPARED = ("params", "io")
"""The slots that a `tp_plan` says anything of; the others are compared by nobody, and yours to change."""

Winner = tuple[Rule, StyleUse]


def changes(model: nn.Module, written: Plan, now: Plan, proposal: Proposal) -> list[str]:
    """One text for each rule that differs, with its modules; and the rules that name nothing any more."""
    before, unmatched = _winners(model, written)
    after, _ = _winners(model, now)
    lines = {line.glob: line for section in proposal.sections.values() for line in section}
    alike: dict[tuple[str, str], list[str]] = {}
    for place in dict.fromkeys([*after, *before]):
        old, new = before.get(place), after.get(place)
        if old is None or new is None or _said(old) != _said(new):
            alike.setdefault((_written(written, old), _now(lines, new)), []).append(_name(place))
    found = [f"{found.message}: {found.span}" for found in unmatched]
    for (old_text, new_text), names in alike.items():
        globs = plan_globs(list(dict.fromkeys(names)), model)
        found += [f"{glob}: {new_text}; {old_text}" for glob in globs]
    return found


def _winners(model: nn.Module, plan: Plan) -> tuple[Mapping[tuple[str, Slot], Winner], list[Diagnostic]]:
    """What wins each compared slot of each module, and the rules that match nothing."""
    state = Compilation(plan, model, Mesh({}), None, {})
    state.modules, state.parameters = dict(model.named_modules()), dict(model.named_parameters())
    match(state)
    found = {
        (path, slot): winner
        for path, slots in state.winners.items()
        for slot, winner in slots.items()
        if slot[0] in COMPARED
    }
    return found, [d for d in state.diagnostics if d.code.startswith("unmatched")]


def _said(winner: Winner) -> tuple[str, dict[str, object]]:
    use = winner[1]
    return use.style, {name: option.value for name, option in use.options.items()}


def _name(place: tuple[str, Slot]) -> str:
    path, (slot, detail) = place
    return full_name(path, detail) if slot == "params" and detail else path


def _written(plan: Plan, winner: Winner | None) -> str:
    if winner is None:
        return f"{plan.file} has no rule"
    rule, use = winner
    return f"{use.style} in {rule.span.file}:{rule.span.line}"


def _now(lines: Mapping[str, PlanLine], winner: Winner | None) -> str:
    if winner is None:
        return "nothing is said of it now"
    rule, use = winner
    line = lines[rule.key]
    texts: Iterator[str] = (text for text in line.styles if use.style in text)
    origin = f" ({line.comment})" if line.comment else ""
    return f"now {next(texts)}{origin}"
