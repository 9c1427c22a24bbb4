"""The names of layouts that rules use: which there are, and which no plan or preset has given a placement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from parallelizer.diagnostics.diagnostic import Diagnostic, Span, quoted
from parallelizer.diagnostics.nearest import did_you_mean, nearest
from parallelizer.language.plan import Flow, Option, Placement, Plan


def layouts_in(value: Any) -> Iterator[Placement]:
    """The placements in the value of an option that stand for a layout by its name."""
    if isinstance(value, Placement):
        if value.kind == "layout":
            yield value
    elif isinstance(value, Flow):
        yield from layouts_in(value.arrives)
        yield from layouts_in(value.wanted)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from layouts_in(part)


def unused_layouts(plan: Plan) -> Iterator[Diagnostic]:
    """A warning for every layout of a plan that none of its rules names: most of them are misspelt."""
    used = {named.name for rule in plan.rules for use in rule.uses for option in use.options.values()
            for named in layouts_in(option.value)}  # fmt: skip
    for name, placement in plan.layouts.items():
        if name not in used:
            help_text = did_you_mean(name, sorted(str(n) for n in used), "the rules name")
            message = f"no rule uses the layout {quoted(name)}"
            yield Diagnostic("unknown-layout", message, placement.span, help_text, "warning")


def unknown_layout(named: Placement, layouts: Iterable[str], span: Span) -> Diagnostic:
    """The diagnostic for a name that is none of `layouts`; `span` is where it stands if it does not know."""
    name = named.name or ""
    known = list(layouts)
    help_text = did_you_mean(name, known, "the layouts are")
    word = nearest(name, ("replicate", "partial", "shard"), 1)
    if word and not nearest(name, known, 1):
        number = name[-1] if name[-1].isdecimal() else "<dimension>"
        meant = f"shard({number})" if word == ["shard"] else word[0]
        help_text = f"did you mean {meant}? {help_text}"
    return Diagnostic("unknown-layout", f"there is no layout {quoted(name)}", named.span or span, help_text)


def unknown_layouts(options: Iterable[Option], layouts: Iterable[str]) -> Iterator[Diagnostic]:
    """One diagnostic for every layout that the options name and that is none of `layouts`."""
    known = list(layouts)
    for option in options:
        for named in layouts_in(option.value):
            if named.name not in known:
                yield unknown_layout(named, known, option.span)
