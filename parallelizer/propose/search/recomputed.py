"""The class that recomputes, from the class that does not.

A mode of checkpointing does the same in every class: from one point of a layer on nothing is computed again, and products of the
same names are kept. One class that was traced in both ways shows this, and the others are traced without recomputation only.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from parallelizer.propose.search.class_trace import ClassTrace, Spot
from parallelizer.propose.search.layer_times import MIDDLE
from parallelizer.simulate.record.operators import ATTENTION, GEMM, Issued, Moment, Operator, Wait

PRODUCTS = (GEMM, ATTENTION)


@dataclass(frozen=True)
class Recomputation:
    """What a mode does to a layer. Backward computes again what runs before the last product, or the `whole` layer, but for
    products whose names are not `again` and collectives of the kinds `received`. For each operator on DTensors of that, the
    host has `dtensors` of them. A layer keeps the results of products that are not computed again, for each of which the host has
    `saves` operators on DTensors in forward, `stream` bytes for each token of a rank's stream, and `fixed` bytes for each token,
    however the stream is split.
    """

    whole: bool
    again: frozenset[str]
    received: frozenset[str]
    dtensors: float
    saves: float
    stream: float
    fixed: float


def recomputation(
    plain: ClassTrace, traced: ClassTrace, split: int, full: Recomputation | None = None
) -> Recomputation:
    """What the mode of `traced` does, by the same class without recomputation. `split` is the number of parts that the stream is
    split into. `full` is what the mode does that keeps the stream alone, if it is known.
    """
    done = [m for m in _backward(traced) if isinstance(m, Operator) and _computed_again(m)]
    names = frozenset(m.name for m in done if m.kind in PRODUCTS)
    products = sum(m.kind in PRODUCTS for m in done)
    moved = sum(m.moved for m in done if m.kind not in PRODUCTS)
    forward, own = _forward(plain)[MIDDLE], _forward(traced)[MIDDLE]

    def miss(whole: bool) -> tuple[int, int]:
        block = _left(_operators(_part(forward, whole)), names)
        others = sum(m.moved for m in block if m.kind not in PRODUCTS)
        return abs(sum(m.kind in PRODUCTS for m in block) - products), abs(others - moved)

    whole = min((False, True), key=miss)
    block = _part(forward, whole)
    sent = _kinds(_backward(traced)) - _kinds(_backward(plain))
    received = frozenset(_kinds([m for m, _ in block])) - set(sent)
    dtensors = _dtensors(_backward(traced)) - _dtensors(_backward(plain))
    rest = (traced.layer - _results(block, names)) / traced.tokens
    saved = _dtensors(_operators(own)) - _dtensors(_operators(forward))
    stream = min(full.stream / split, rest) if full is not None else rest
    return Recomputation(
        whole,
        names,
        received,
        dtensors / max(_dtensors(_left(_operators(block), names)), 1),
        saved / max(len(_kept(block, names)), 1),
        stream * split,
        rest - stream,
    )


def _backward(traced: ClassTrace) -> list[Moment]:
    return [m for m in traced.line if m.phase == "backward" and traced.place(m.module) == MIDDLE]


def _computed_again(operator: Operator) -> bool:
    """Whether a checkpoint computes it a second time; of attention its direction in backward says so."""
    return operator.again or (operator.kind == ATTENTION and not operator.backward)


def _kinds(moments: Sequence[Moment]) -> Counter[str]:
    """The kinds of collectives, but for FSDP's."""
    return Counter(m.entry.kind for m in moments if isinstance(m, Issued) and not m.unit)


def _dtensors(moments: Sequence[Moment]) -> int:
    return sum(m.dtensors for m in moments if isinstance(m, Operator))


def recomputed(plain: ClassTrace, mode: Recomputation, split: int) -> ClassTrace:
    """The class without recomputation as it is in a mode."""
    results = _results(_part(_forward(plain)[MIDDLE], mode.whole), mode.again)
    layer = min(max(round(results + plain.tokens * (mode.stream / split + mode.fixed)), 0), plain.layer)
    spots = tuple(_spot(spot, spot.whole * (plain.layer - layer)) for spot in plain.spots)
    return dataclasses.replace(plain, line=_line(plain, mode), spots=spots, layer=layer)


def _spot(spot: Spot, less: int) -> Spot:
    use = {**spot.use, "activations": spot.use["activations"] - less}
    return dataclasses.replace(spot, use=use)


Referenced = list[tuple[Moment, int]]
"""Moments, each with the number of the collective that it issues or waits for; -1 for operators."""


def _line(plain: ClassTrace, mode: Recomputation) -> tuple[Moment, ...]:
    """The line with what each layer computes again before its backward."""
    forward = _forward(plain)
    kept = {id(m) for layer in forward.values() for m in _kept(_part(layer, mode.whole), mode.again)}
    made: Referenced = []
    for moment, collective in _referenced(plain.line):
        index = plain.place(moment.module)
        begins = isinstance(moment, Operator) and moment.phase == "backward" and not moment.copies
        if begins and index in forward:
            made += _again(_part(forward.pop(index), mode.whole), mode)
        if isinstance(moment, Operator) and id(moment) in kept:
            moment = dataclasses.replace(moment, dtensors=moment.dtensors + round(mode.saves))
        made.append((moment, collective))
    return _counted(made)


def _referenced(line: Sequence[Moment]) -> Referenced:
    issued = 0
    found: Referenced = []
    for moment in line:
        issued += isinstance(moment, Issued)
        back = moment.back if isinstance(moment, Wait) else 1
        found.append((moment, -1 if isinstance(moment, Operator) else issued - back))
    return found


def _counted(made: Referenced) -> tuple[Moment, ...]:
    """The moments, with waits that count what is issued between."""
    places: dict[int, int] = {}
    issued = 0
    found: list[Moment] = []
    for moment, collective in made:
        if isinstance(moment, Issued):
            places[collective] = issued
            issued += 1
        back = issued - places[collective] if isinstance(moment, Wait) else 0
        found.append(dataclasses.replace(moment, back=back) if isinstance(moment, Wait) else moment)
    return tuple(found)


def _forward(plain: ClassTrace) -> dict[int, Referenced]:
    """What each layer does forward, without what FSDP does for it."""
    found: dict[int, Referenced] = {}
    of_units: set[int] = set()
    for moment, collective in _referenced(plain.line):
        if isinstance(moment, Issued) and moment.unit:
            of_units.add(collective)
        index = plain.place(moment.module)
        copies = isinstance(moment, Operator) and moment.copies
        if index is not None and moment.phase == "forward" and collective not in of_units and not copies:
            found.setdefault(index, []).append((moment, collective))
    return found


def _operators(block: Referenced) -> list[Operator]:
    return [moment for moment, _ in block if isinstance(moment, Operator)]


def _part(forward: Referenced, whole: bool) -> Referenced:
    """The whole layer, or what runs before its last product."""
    places = [at for at, (m, _) in enumerate(forward) if isinstance(m, Operator) and m.kind in PRODUCTS]
    return forward if whole or not places else forward[: places[-1]]


def _left(block: Sequence[Operator], again: frozenset[str]) -> list[Operator]:
    """Without the products that are not computed `again`."""
    return [m for m in block if m.kind not in PRODUCTS or m.name in again]


def _kept(block: Referenced, again: frozenset[str]) -> list[Operator]:
    """The products that are not computed `again`."""
    return [m for m in _operators(block) if m.kind in PRODUCTS and m.name not in again]


def _again(block: Referenced, mode: Recomputation) -> Referenced:
    """The moments of a block that backward has again. Collectives have other numbers, and what waits for a collective before the
    block has waited in forward.
    """
    issued: set[int] = set()
    found: Referenced = []
    for moment, collective in block:
        if isinstance(moment, Operator):
            if _left([moment], mode.again):
                host = round(moment.dtensors * mode.dtensors)
                found.append((dataclasses.replace(moment, phase="backward", again=True, dtensors=host), -1))
        elif isinstance(moment, Issued):
            if moment.entry.kind not in mode.received:
                issued.add(collective)
                entry = dataclasses.replace(moment.entry, phase="backward")
                found.append((dataclasses.replace(moment, entry=entry), -2 - collective))
        elif collective in issued:
            found.append((dataclasses.replace(moment, phase="backward"), -2 - collective))
    return found


def _results(block: Referenced, again: frozenset[str]) -> int:
    """The bytes of the results of the products that are not computed again."""
    return sum(map(_bytes, _kept(block, again)))


def _bytes(product: Operator) -> int:
    if not product.sizes:
        return 0
    size = 4 if product.dtype == "float32" else 2
    if product.kind == GEMM:
        batch, m, n, _ = product.sizes
        return batch * m * n * size
    batch, heads, _, queries, _, width = product.sizes
    return batch * heads * queries * (width * size + 4)
