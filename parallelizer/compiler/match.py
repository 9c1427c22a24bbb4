"""The first pass: selects the rule that wins each slot of each module. It reports rules that match nothing,
and rules that are always overridden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from parallelizer.compiler.compilation import Compilation
from parallelizer.diagnostics.diagnostic import Related, Span
from parallelizer.language.fold import fold_alternatives
from parallelizer.language.glob import outer_braces, parse_glob
from parallelizer.language.parse_rule import slot_of
from parallelizer.language.plan import Rule, full_name
from parallelizer.language.styles import STYLES
from parallelizer.language.suggest import suggest
from parallelizer.styles.application import Slot
from parallelizer.styles.tied_parameters import parameter_names

STRANGERS = 3
ALMOST_ALL = 0.75
"""From so many rules that match nothing, and this share of all, a plan is taken for that of another model."""


def match(state: Compilation) -> None:
    """Fill `state.winners`: on one module and one slot the later rule wins."""
    paths, names = list(state.modules), list(parameter_names(state.model))
    beaten_by: dict[int, Rule] = {}
    for rule in state.plan.rules:
        targets = _targets(state, rule, paths, names)
        if targets is None:
            continue
        found = [full_name(path, param) for path, param in targets if param is not None]
        only_modules = any(param is None for _, param in targets) or (
            rule.uses and not targets and not any(STYLES[use.style].takes_parameters for use in rule.uses)
        )
        every = paths if only_modules else list(dict.fromkeys([*paths, *names, *found]))
        _report_unmatched(state, rule, bool(targets), every)
        emptied = 0
        for path, param in targets:
            slots = state.winners.setdefault(path, {})
            for slot in _emptied(rule, param, slots):
                beaten_by[id(slots.pop(slot)[0])] = rule
                emptied += 1
            for use in rule.uses:
                name, axis = slot_of(use)
                for slot in _replaced((name, param or axis), slots):
                    beaten_by[id(slots.pop(slot)[0])] = rule
                slots[name, param or axis] = (rule, use)
        if targets and not rule.uses and not emptied and not rule.optional:
            state.find(
                "shadowed-rule",
                f"{_shown(rule)} has no slot to empty",
                rule.span,
                "remove the rule, or move it below the rules that fill the slots",
                severity="warning",
            )
    _gather_strangers(state)
    _report_losers(state, beaten_by)


def taken_away(rules: Iterable[Rule], paths: Sequence[str]) -> tuple[Related, ...]:
    """The `none` rules that leave a slot of one of these modules empty, which an earlier rule had filled."""
    found: dict[Span, Related] = {}
    for path in paths:
        stands: dict[str, str] = {}
        taken: dict[str, tuple[Rule, str]] = {}
        for rule in rules:
            if not rule.glob.select([path]):
                continue
            for slot in rule.empties & stands.keys():
                taken[slot] = rule, stands.pop(slot)
            for use in rule.uses:
                slot = slot_of(use)[0]
                stands[slot] = use.style
                taken.pop(slot, None)
        for rule, style in taken.values():
            found.setdefault(rule.span, Related(rule.span, f"this rule removes `{style}`"))
    return tuple(found.values())


def _targets(
    state: Compilation, rule: Rule, paths: list[str], names: list[str]
) -> list[tuple[str, str | None]] | None:
    """The modules that a rule names, or else the parameters, or else the buffers, with the module of each; None after
    an error.
    """
    modules: list[tuple[str, str | None]] = [(path, None) for path in rule.glob.select(paths)]
    if modules:
        return modules
    found = rule.glob.select(names)
    what = "parameter"
    if not found:
        found, what = rule.glob.select([n for n, _ in state.model.named_buffers()]), "buffer"
    misfit = next((u for u in rule.uses if not STYLES[u.style].takes_parameters), None)
    if found and misfit:
        state.find(
            "style-on-parameter",
            f"`{rule.key}` matches a {what}, but {misfit.style} is a style for modules",
            misfit.span,
            f"match its module: {found[0].rpartition('.')[0]}",
        )
        return None
    return [(path, leaf) for path, _, leaf in (name.rpartition(".") for name in found)]


def _emptied(rule: Rule, param: str | None, slots: Iterable[Slot]) -> list[Slot]:
    """What a rule takes away from one target: of a parameter only what was given to it by name."""
    return [s for s in slots if s[0] in rule.empties and (param is None or s == ("params", param))]


def _replaced(new: Slot, slots: Iterable[Slot]) -> list[Slot]:
    """What a new winner takes the place of: a style for all of a module's parameters also that of single
    ones.
    """
    return [s for s in slots if s == new or (new == ("params", None) and s[0] == "params")]


def _top(names: list[str]) -> str:
    """The first segments of all paths, in the alphabet's order, some of them."""
    top = sorted({name.partition(".")[0] for name in names if name})
    return ", ".join(top[:8]) + (", ..." if len(top) > 8 else "")


def _report_unmatched(state: Compilation, rule: Rule, matched: bool, names: list[str]) -> None:
    if rule.optional:
        return
    if not matched:
        near = suggest(rule.key, names)
        hint = "; ".join(f"`{g}` (matches {n})" for g, n in near) if near else f"the model has {_top(names)}"
        state.find(
            "unmatched-glob",
            f"{_shown(rule)} matches no module",
            rule.span,
            _reach(rule.key, near) + (f"did you mean {hint}?" if near else hint),
        )
        return
    dead = rule.glob.unmatched(names)
    if not dead:
        _report_idle_characters(state, rule, names)
        return
    folded = fold_alternatives(dead)
    shown = ", ".join(f"`{text}`" for text in folded[:3]) + (", ..." if len(folded) > 3 else "")
    one = len(dead) == 1
    what = f"one alternative of `{rule.key}`, matches" if one else f"alternatives of `{rule.key}`, match"
    likely = next((found[0][0] for text in folded[:3] if (found := suggest(text, names))), None)
    hint = f"remove {'it' if one else 'them'} from the braces"
    if likely:  # two misspellings may be meant to be the same name: folded anew, it stands once
        meant = fold_alternatives(parse_glob(likely).alternatives)
        hint = f"did you mean {', '.join(f'`{text}`' for text in meant)}?"
    place = _choice(rule, names) or rule.span
    state.find("unmatched-alternative", f"{shown}, {what} no module", place, hint)


def _choice(rule: Rule, names: list[str]) -> Span | None:
    """Where the one choice of the glob's outer braces stands that leads to nothing; None if there is not one."""
    span, key = rule.span, rule.key
    quotes = {len(key): 0, len(key) + 2: 1}.get(span.end_column - span.column)
    dead = [
        (start, end)
        for opening, closing, choices in outer_braces(key)
        for start, end in choices
        if not parse_glob(key[:opening] + key[start:end] + key[closing:]).select(names)
    ]
    if quotes is None or len(dead) != 1:
        return None
    first = span.column + quotes
    return replace(span, column=first + dead[0][0], end_column=first + max(dead[0][1], dead[0][0] + 1))


def _gather_strangers(state: Compilation) -> None:
    """One finding in place of those of each rule, where almost none matches: then the plan is of another model."""
    lost = [d for d in state.diagnostics if d.code == "unmatched-glob"]
    of_the_plan = {d.span for d in lost}
    needed = [rule for rule in state.plan.rules if rule.key and not rule.optional]
    unlike = [
        d for d in lost if "did you mean" not in (d.help or "")
    ]  # the others are misspelt names of this model
    if len(lost) < STRANGERS or len(lost) < ALMOST_ALL * len(needed) or len(unlike) < len(lost) / 2:
        return
    state.diagnostics[:] = [d for d in state.diagnostics if d.span not in of_the_plan]
    top = _top(list(state.modules))
    state.find(
        "unmatched-glob",
        f"{len(lost)} of {len(needed)} rules match no module: this is the plan of another model",
        lost[0].span,
        f"the model has {top}: choose its plan with plan=NAME, or let `python -m parallelizer init` propose one",
    )


def _reach(key: str, near: Sequence[tuple[str, int]]) -> str:
    """Why a `*` that was to cross segments matched nothing."""
    likely = near[0][0] if near else ""
    crosses = "**" in likely or (key.startswith("*") and likely.count(".") > key.count("."))
    return "`*` matches within one segment only; " if "*" in key and "**" not in key and crosses else ""


def _report_idle_characters(state: Compilation, rule: Rule, names: list[str]) -> None:
    """Report a character of a set that matches nothing: it is an alternative like those in braces."""
    for character, inside in rule.glob.idle_characters(names):
        twice = inside.count(character) > 1
        state.find(
            "unmatched-alternative",
            f"`{character}` in `{inside}` of `{rule.key}` {'occurs twice' if twice else 'matches no module'}",
            rule.span,
            f"remove it from the set{'; a set has no commas and no blanks' if character in ', ' else ''}",
        )


def _report_losers(state: Compilation, beaten_by: dict[int, Rule]) -> None:
    winning = {id(rule) for slots in state.winners.values() for rule, _ in slots.values()}
    for rule in state.plan.rules:
        later = beaten_by.get(id(rule))
        if later is None or id(rule) in winning or rule.optional:
            continue
        if later.span.file != rule.span.file:
            continue  # a plan that extends another replaces rules on purpose, and so do a preset and a command
        state.find(
            "shadowed-rule",
            f"{_shown(rule)} has no effect: later rules fill all of its slots",
            rule.span,
            "remove the rule, or move it below the other rules",
            severity="warning",
            related=(Related(later.span, "this rule takes effect instead"),),
        )


def _shown(rule: Rule) -> str:
    return f"`{rule.key}`" if rule.key else 'the rule of the root (`""`)'
