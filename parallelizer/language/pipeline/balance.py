"""How many layers each stage gets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction


def balanced_sizes(layers: Sequence[float], stages: int, head: float = 0, tail: float = 0) -> tuple[int, ...]:
    """As `balanced_by_stage`, for layers that cost the same on every stage."""
    return balanced_by_stage([layers] * stages, head, tail)


def balanced_by_stage(layers: Sequence[Sequence[float]], head: float = 0, tail: float = 0) -> tuple[int, ...]:
    """The number of layers of each stage, so that the stage with the highest cost costs as little as possible.

    `layers` has, for each stage, the cost of each layer there, in any unit. `head` is the cost of what runs before the layers, on
    the first stage, and `tail` of what runs after them, on the last. Every stage gets at least one layer. Of equally good
    divisions, the one with the smallest sum of squared costs is taken, which evens out the other stages too; of those
    that still tie, the one with fewer layers on earlier stages, which hold more microbatches in most schedules. Costs are
    summed exactly, so layers of equal cost are equal. Raises ValueError for fewer layers than stages and for costs that
    are negative or not finite.
    """
    stages, count = len(layers), len(layers[0]) if layers else 0
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot be divided into {stages} stages with a layer each")
    if any(not math.isfinite(cost) or cost < 0 for cost in (*itertools.chain(*layers), head, tail)):
        raise ValueError("a cost is negative or not finite")
    *exact, first, last = _as_integers([*itertools.chain(*layers), head, tail])
    ends = []
    for stage in range(stages):
        own = [0, *itertools.accumulate(exact[stage * count : (stage + 1) * count])]
        if stage == 0:
            own = [0, *(end + first for end in own[1:])]
        if stage == stages - 1:
            own[-1] += last
        ends.append(own)
    return _most_even(ends, _least_maximum(ends))


def sizes_mistake(sizes: Sequence[int], layers: int, stages: int) -> str | None:
    """Why these are no numbers of layers of so many stages; None if they are."""
    if len(sizes) != stages:
        return f"the list has {len(sizes)} numbers of layers, but there are {stages} stages"
    if any(size < 1 for size in sizes):
        return f"stage {next(at for at, size in enumerate(sizes) if size < 1)} has no layer"
    if sum(sizes) != layers:
        return f"the numbers of layers add up to {sum(sizes)}, but the model has {layers} layers"
    return None


def _as_integers(costs: Sequence[float]) -> list[int]:
    """The costs in a unit in which all of them are whole numbers. There is one, because floats are binary fractions."""
    fractions = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * unit) for fraction in fractions]


def _least_maximum(ends: Sequence[Sequence[int]]) -> int:
    """The lowest cost that no stage needs to exceed. `ends` has, for each stage, the cost of the first n layers, n from 0."""
    stages, count = len(ends), len(ends[0]) - 1
    # Of the layers from `start` on, in the last stage.
    best = [ends[-1][count] - ends[-1][start] for start in range(count)]
    for left in range(2, stages + 1):
        own = ends[stages - left]
        best = [
            min(max(own[end] - own[start], best[end]) for end in range(start + 1, count - left + 2))
            if start <= count - left
            else 0
            for start in range(count)
        ]
    return best[0]


def _most_even(ends: Sequence[Sequence[int]], most: int) -> tuple[int, ...]:
    """Of the divisions in which no stage costs more than `most`, that with the smallest sum of squares."""
    stages, count = len(ends), len(ends[0]) - 1
    best: dict[int, tuple[int, tuple[int, ...]]] = {count: (0, ())}  # for the layers from a start on
    for left in range(1, stages + 1):
        own = ends[stages - left]
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start in range(stages - left, count - left + 1):
            for end in range(start + 1, count + 1):
                cost = own[end] - own[start]
                if cost > most:
                    break
                if end in best:
                    squares, sizes = best[end]
                    candidate = (squares + cost * cost, (end - start, *sizes))
                    if start not in found or candidate < found[start]:
                        found[start] = candidate
        best = found
    return best[0][1]
