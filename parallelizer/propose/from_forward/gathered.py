"""A sequence that is split over cp inside the model, around modules that every rank computes with the whole of it.

Context parallelism proper splits the batch, and asks the model for one attention call with whole masks and positions. A model
that writes its attention out, or makes masks and positions of its own, is given the whole batch instead. The blocks get a
rank's part of the stream, and what mixes tokens in them is given all of it, and keeps the rank's rows of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallelizer.propose.from_forward.facts import Facts
from parallelizer.propose.globs import pattern

EXACT, ATTENTION, ALL = "exact", "attention", "all"
"""What is given the whole sequence: attention that is written out, where calls of attention are exact over cp; all modules with
attention; also those in which another operator needs a dimension of the sequence whole, such as convolutions and scans.
"""
FORMS = EXACT, ATTENTION, ALL

SPLIT, WHOLE = "replicate -> shard(1)", "shard(1) -> replicate"


@dataclass(frozen=True)
class Gathered:
    """The rules over cp: for the modules of each, a style and a comment. `mixers` are given the whole sequence, `heads` their
    part of it, and `exact` call attention.
    """

    rules: tuple[tuple[tuple[str, ...], str, str], ...]
    mixers: tuple[str, ...]
    heads: tuple[str, ...]
    exact: tuple[str, ...]


def gathered(facts: Facts, what: str) -> Gathered | None:
    """The rules, or None where the blocks are such that nothing can be split in them."""
    exact = _exact(facts) if what == EXACT else ()
    mixers = _mixers(facts, what, exact)
    if (
        mixers is None
        or not (exact or (mixers and what != EXACT))
        or any(not facts.parts[block].rows for block in facts.blocks if block in facts.parts)
    ):
        return None
    heads = _heads(facts)
    rules: list[tuple[tuple[str, ...], str, str]] = []
    if exact:
        rules.append((exact, "context-parallel", "exact attention over a split sequence"))
    for group in _groups(facts):
        first, last = group[0], group[-1]
        taken, given = f"input: {{{facts.parts[first].rows[0]}: {SPLIT}}}", f"output: {WHOLE}"
        if first == last:
            rules.append(
                ((first,), f"{{style: prepare-io, axis: cp, {taken}, {given}}}", "on a rank's tokens")
            )
        else:
            rules.append(
                ((first,), f"{{style: prepare-input, axis: cp, {taken}}}", "from here on a rank's tokens")
            )
            rules.append(((last,), f"{{style: prepare-output, axis: cp, {given}}}", "all tokens again"))
    by_rows: dict[tuple[str, ...], list[str]] = {}
    for path in mixers:
        by_rows.setdefault(facts.parts[path].rows, []).append(path)
    for names, paths in by_rows.items():
        flows = ", ".join(f"{name}: {WHOLE}" for name in names)
        style = f"{{style: prepare-io, axis: cp, input: {{{flows}}}, output: {SPLIT}}}"
        rules.append((tuple(paths), style, "not split over cp: every rank computes the whole sequence"))
    for head in heads:
        style = f"{{style: prepare-input, axis: cp, input: {{{facts.parts[head].argument}: {SPLIT}}}}}"
        rules.append(((head,), style, "logits of a rank's tokens"))
    return Gathered(tuple(rules), mixers, heads, exact)


def _groups(facts: Facts) -> list[Sequence[str]]:
    """The blocks of each list that are called, in order of execution."""
    order = {path: at for at, path in enumerate(facts.parts)}
    groups: dict[str, list[str]] = {}
    for block in sorted((b for b in facts.blocks if b in order), key=order.__getitem__):
        groups.setdefault(pattern(block), []).append(block)
    return list(groups.values())


def _exact(facts: Facts) -> tuple[str, ...]:
    """The modules inside blocks that call attention, where all have the tokens of one stream."""
    if len(_groups(facts)) != 1:  # a decoder's attention to an encoder's tokens, which are whole
        return ()
    return tuple(a for a in facts.attentions if any(a == b or a.startswith(f"{b}.") for b in facts.blocks))


def _mixers(facts: Facts, what: str, exact: Sequence[str]) -> tuple[str, ...] | None:
    """The innermost modules inside blocks that mix tokens, take the stream, and give it back; None where the code of a block
    itself mixes them.
    """
    found: list[str] = []
    gates = {gate for region in facts.regions for gate in region.gates}
    for place in (*facts.mixing, *(facts.needing if what == ALL else ())):
        block = next((b for b in facts.blocks if place == b or place.startswith(f"{b}.")), None)
        if block is None or place in exact:  # it is given all tokens anyway, or needs not be
            continue
        inside = [path for path in _outwards(place, block) if path in facts.parts and facts.parts[path].rows]
        # Behind a gate the stream is a DTensor over tp, and what is gathered over cp is a plain tensor.
        outer = [path for path in inside if path in gates]
        if inside:
            found.append((outer or inside[:1])[-1])
        elif place in facts.mixing:
            return None
    return tuple(path for path in dict.fromkeys(found) if not any(path.startswith(f"{o}.") for o in found))


def _outwards(path: str, block: str) -> Iterable[str]:
    """A module, then those around it, up to the block, which is none of them."""
    while path != block:
        yield path
        path = path.rpartition(".")[0]


def _heads(facts: Facts) -> tuple[str, ...]:
    """The heads, if each gives logits of every token to a loss that can take a part of them."""
    possible = [
        head
        for head, by_token in facts.heads.items()
        if by_token and head not in facts.computed_with and head in facts.parts and facts.parts[head].argument
    ]
    return tuple(possible) if len(possible) == len(facts.heads) else ()
