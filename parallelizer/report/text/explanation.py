"""`explain PATH`: the rules that matched a module or parameter, what won, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from parallelizer.compiler.parameter_shards import ParameterShard
from parallelizer.compiler.wording import dims, place
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import Rule
from parallelizer.report.explanation import Answer, Explanation, Filled, Matched, explain
from parallelizer.report.rows.parameters import parameter_rows, shape
from parallelizer.report.rows.paths import shown_paths
from parallelizer.report.text import tables
from parallelizer.report.text.tables import Column

MOST = 8
"""So many kinds of modules are explained before it is said that there are more."""


def explain_path(
    setup: Setup, word: str, stream: TextIO, *, rank: int = 0, width: int | None = None
) -> Answer:
    """Print why a module, a parameter, or each of those that a glob names is laid out as it is.

    What is explained alike is explained once. Raises PlanError, with nothing printed, when the word names
    nothing.
    """
    answer = explain(setup, word, rank)
    screen = tables.console(stream, width)
    groups = _alike(answer.explanations)
    for at, group in enumerate(groups[:MOST]):
        if at:
            screen.print()
        _write(group, setup, rank, screen)
    if len(groups) > MOST:
        rest = sum(map(len, groups[MOST:]))
        screen.print(f"\n... and {rest:,} more with other layouts: use a narrower glob")
    return answer


def _alike(explanations: Sequence[Explanation]) -> list[list[Explanation]]:
    """Those that differ in nothing but their paths, together."""
    groups: dict[tuple[object, ...], list[Explanation]] = {}
    for one in explanations:
        depth = len(one.module) + 1 if one.module else 0
        units = tuple((u.module == one.module, id(u.rule)) for u in one.units)
        shards = tuple(
            (s.name[depth:], s.global_shape, s.local_shape, *s.placements.items()) for s in one.parameters
        )
        key = (one.parameter, one.kind, one.rules, one.slots, units, shards)
        groups.setdefault(_hashable(key), []).append(one)
    return list(groups.values())


def _hashable(value: Any) -> tuple[object, ...]:
    """Rules hold maps: their identity stands for them."""
    parameter, kind, rules, slots, units, shards = value
    return (
        parameter,
        kind,
        tuple(
            (id(m.rule), tuple((s, o if isinstance(o, str) else id(o)) for s, o in m.outcomes)) for m in rules
        ),
        tuple(
            (f.slot, f.style, f.axes, id(f.rule), f.effect, f.reason, f.values, f.flows, f.notes)
            for f in slots
        ),
        units,
        shards,
    )


def _write(group: Sequence[Explanation], setup: Setup, rank: int, screen: Console) -> None:
    one = group[0]
    what = one.kind if one.parameter is None else f"a parameter of {one.kind}"
    count = f"{len(group):,} alike, each " if len(group) > 1 else ""
    for name in shown_paths(e.path for e in group):
        screen.print(Text(name, "bold"), soft_wrap=True)
    screen.print(f"  {count}{what}; plan {setup.plan.name} on {setup.mesh}")
    screen.print()
    _rules(one.rules, screen)
    for at, filled in enumerate(one.slots):
        # A rule that names several parameters of the module fills the slot once for each.
        if filled not in one.slots[:at]:
            _slot(filled, screen)
    _parameters(group, rank, screen)


def _rules(rules: Sequence[Matched], screen: Console) -> None:
    title = Text.assemble(("rules", "bold"), " that match, in order; on one slot the later wins")
    if not rules:
        screen.print("no rule matches it\n")
        return
    rows = [[_key(m.rule), _outcome(m), place(m.rule.span)] for m in rules]
    tables.write(screen, title, [Column("rule", wrap="path"), Column("slots"), Column("where")], rows)
    screen.print()


def _outcome(matched: Matched) -> str:
    lines = []
    for slot, outcome in matched.outcomes:
        if isinstance(outcome, Rule):
            lines.append(f"{slot}: taken by {_line(outcome.span)}")
        else:
            lines.append(f"{slot}: {_OUTCOMES[outcome]}")
    return "\n".join(lines)


_OUTCOMES = {"wins": "wins", "empties": "left without a style"}


def _line(span: Span) -> str:
    return "the command line" if span.file.startswith("<") else f"line {span.line}"


def _key(rule: Rule) -> str:
    return rule.key or '""'


def _slot(filled: Filled, screen: Console) -> None:
    over = f" over {' x '.join(filled.axes)}" if filled.axes else ""
    effect = "" if filled.effect == "applied" else f": {filled.effect}, {filled.reason}"
    title = Text.assemble(
        (filled.slot, "bold"), f"  {filled.style}{over}{effect}, by {place(filled.rule.span)}"
    )
    screen.print(title, soft_wrap=True)
    sources = {
        "rule": "the rule",
        "preset": f"parallel.styles.{filled.style}",
        "default": "the style's default",
    }
    rows = [
        [
            v.name,
            v.text + (f"  ({v.layouts})" if v.layouts else ""),
            sources[v.source] + (f", {place(v.span)}" if v.span else ""),
        ]
        for v in filled.values
    ]
    width = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    for name, text, source in rows:
        screen.print(f"  {name:<{width[0]}}  {text:<{width[1]}}  {source}".rstrip(), soft_wrap=True)
    for line in (*filled.flows, *filled.notes):
        screen.print(f"  {line}", soft_wrap=True)
    screen.print()


def _parameters(group: Sequence[Explanation], rank: int, screen: Console) -> None:
    found = parameter_rows(shard for one in group for shard in one.parameters)
    if not found:
        return
    columns = [Column("parameter", wrap="path"), Column("global"), Column("local"), Column("dimensions")]
    rows = [
        [
            "\n".join(row.paths),
            shape(row.shard.global_shape),
            shape(row.shard.local_shape),
            _dims(row.shard),
        ]
        for row in found
    ]
    title = Text.assemble(("parameters", "bold"), f" of rank {rank}, with the axes that shard each dimension")
    tables.write(screen, title, columns, rows)
    units = dict.fromkeys((unit.module, place(unit.rule.span)) for one in group for unit in one.units)
    if units:
        named = ", ".join(shown_paths(module for module, _ in units))
        by = ", ".join(dict.fromkeys(rule for _, rule in units))
        screen.print(f"  sharded and gathered by fsdp with {named}, by {by}", soft_wrap=True)


def _dims(shard: ParameterShard) -> str:
    whole = f"  whole: {shard.reason}" if shard.reason else ""
    return f"({', '.join(dims(shard))})" + whole
