"""What may have been meant: the nearest names to a misspelt one, and globs near one that matches nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from parallelizer.diagnostics.nearest import nearest
from parallelizer.language.glob import (
    CHARACTER_SET,
    GlobError,
    PathTree,
    escape,
    is_pattern,
    parse_glob,
    path_tree,
    split_path,
    step_down,
)


def suggest(text: str, paths: Sequence[str]) -> list[tuple[str, int]]:
    """What a glob that matches nothing may have been meant to be: at most 3 globs, best first, each with the
    number of paths (at least 1) that it matches.

    Tried are a name spelled like one that is there, a segment left out, a first segment too many, and `**`
    where `*` or nothing cannot reach; two of these together only if no single one helps. Nothing for a glob
    that does match, does not parse, or whose braces hold hundreds of wildcards.
    """
    try:
        parsed = parse_glob(text)
    except GlobError:
        return []
    units = _units(text)
    # Before anything is matched: thousands of wildcards take a second to find nothing.
    if sum(is_pattern(a) for unit in units for a in _alternatives(unit)) > _MOST_PATTERNS:
        return []
    if parsed.select(paths):
        return []
    tree = path_tree(tuple(paths))
    for edits, start in ((0, _units(text.replace("/", "."))), (1, units), (2, units)):
        merits: dict[str, tuple[int, ...]] = {}
        for merit, edited in _edited(tree, [0], start, edits):
            glob = ".".join(edited)
            merits[glob] = min(merit, merits.get(glob, merit))
        found = _distinct(sorted(merits, key=lambda glob: (merits[glob], len(glob), glob)), paths)
        if found:
            found.sort(key=lambda pair: (merits[pair[0]], -pair[1]))
            return found[:3]
    return []


def _distinct(globs: Iterable[str], paths: Sequence[str]) -> list[tuple[str, int]]:
    """The globs that match something, and not the same as an earlier one, each with the number of matches."""
    found: dict[tuple[str, ...], str] = {}
    for glob in globs:
        try:
            matched = parse_glob(glob).select(paths)
        except GlobError:  # an edit may push a long glob over the limits
            continue
        if matched:
            found.setdefault(tuple(matched), glob)
    return [(glob, len(matched)) for matched, glob in found.items()]


def _units(text: str) -> tuple[str, ...]:
    """A glob cut at the dots that stand outside braces; each part is a glob too."""
    units = [""]
    depth = 0
    for token in re.findall(rf"{CHARACTER_SET.pattern}|.", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if token == "." and not depth:
            units.append("")
        else:
            units[-1] += token
    return tuple(units)


def _reach(tree: PathTree, nodes: list[int], units: Sequence[str]) -> list[int]:
    """The nodes, each once, that some units lead to."""
    for unit in units:
        alternatives = _alternatives(unit)
        # A long list of plain names, such as `{0..125}`, is looked up at once.
        plain = {a for a in alternatives if a and "." not in a and not is_pattern(a)}
        reached = {child for node in nodes for name, child in tree.children[node].items() if name in plain}
        for alternative in alternatives:
            if alternative not in plain:
                ahead = nodes
                for segment in split_path(alternative):
                    ahead = step_down(tree, ahead, segment)
                reached.update(ahead)
        nodes = sorted(reached)
    return nodes


@lru_cache(maxsize=256)
def _alternatives(unit: str) -> tuple[str, ...]:
    try:
        return parse_glob(unit).alternatives
    except GlobError:  # an edit may make one that is too long
        return ()


def _edited(
    tree: PathTree, nodes: list[int], units: tuple[str, ...], edits: int
) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Ways to change `edits` units so that they lead from `nodes` to paths, with merits (low is good)."""
    if not edits:
        if any(tree.ending[node] for node in _reach(tree, nodes, units)):
            yield (), units
        return
    for at, unit in enumerate(units):
        for merit, changed in _edits(tree, nodes, units, at):
            reached = _reach(tree, nodes, changed)
            if reached:
                for more, rest in _edited(tree, reached, units[at + 1 :], edits - 1):
                    yield merit + more, units[:at] + changed + rest
        nodes = _reach(tree, nodes, [unit])
        if not nodes:
            return


_MOST_PATTERNS = 200
"""How many patterns a glob may consist of for suggestions to be looked for; what people write has a few."""

_MOST_NAMES = 200
"""How many names are tried for a segment that was left out; real modules have far fewer kinds of children."""


def _edits(
    tree: PathTree, nodes: Sequence[int], units: tuple[str, ...], at: int
) -> Iterator[tuple[tuple[int, int], tuple[str, ...]]]:
    """What might have been meant by one unit, where `nodes` is what came before it, likeliest kinds first."""
    unit = units[at]
    names = dict.fromkeys(name for node in nodes for name in tree.children[node])
    for order, spelled in enumerate(_respelled(unit, names)):
        yield (0, order), (spelled,)
    kinds = dict.fromkeys("*" if name.isdecimal() else escape(name) for name in names)
    if unit != "**":
        for kind in list(kinds)[:_MOST_NAMES]:
            yield (1, int(kind == "*")), (kind, unit)
    if at == 0 and len(units) > 1 and units[1].strip("*"):
        yield (2, 0), ()
    if unit == "*":
        yield (3, 0), ("**",)
    elif unit.startswith("*") and unit != "**":
        yield (3, 0), ("**", unit[1:])
    if unit != "**":
        yield (4, 0), ("**", unit)


def _respelled(unit: str, names: Iterable[str]) -> list[str]:
    """Spellings of a unit that use `names`; `*` for numbers, of which none is nearer than another."""
    if re.fullmatch(r"[0-9{},.]+", unit):
        return ["*"] if any(name.isdecimal() for name in names) else []
    if is_pattern(unit):
        return []
    if "{" not in unit:
        return [escape(name) for name in nearest(unit, names)]

    def word(written: re.Match[str]) -> str:
        near = nearest(written[0], names, n=1)
        return escape(near[0]) if near else written[0]

    return [re.sub(r"[^{},.]+", word, unit)]
