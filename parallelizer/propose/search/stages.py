"""The stages of a pipeline in closed form: how the layers are cut, how long the schedule takes, and what its ranks hold."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parallelizer.language.pipeline.actions import BACKWARD, BACKWARD_INPUT, FORWARD, Action, Order
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.replay import ActionCosts, replay
from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.class_trace import ClassTrace
from parallelizer.propose.search.layer_times import UnitBytes

ROUNDS = 2
"""Microbatches for each rank that are replayed; each of the others takes what the slowest rank computes."""

ORDERS = 32
"""Orders that are kept: each has an object for every action."""

HALF = 1.25
"""What a layer holds between the halves of its backward, by its activations: the gradients of its products are there too, and
what only the first half needs is not.
"""

WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved-1f1b")
"""Schedules whose first rank computes nothing while a first and a last microbatch are on the others."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a stage for one microbatch."""

    forward: float
    backward: float


@functools.cache
def cut_layers(layers: int, stages: int, layer: float, first: float, last: float) -> tuple[int, ...]:
    """The number of equal layers of each stage, so that the slowest takes as little as possible: each next layer goes where the
    stage is fastest with it, of equals to the later.
    """
    counts = [1] * stages
    costs = [layer + (first if at == 0 else 0) + (last if at == stages - 1 else 0) for at in range(stages)]
    for _ in range(layers - stages):
        at = min(range(stages), key=lambda s: (costs[s], -s))
        counts[at] += 1
        costs[at] += layer
    return tuple(counts)


def level_layers(
    cut: Candidate, peaks_of: Callable[[Candidate, Sequence[int]], Sequence[int]]
) -> tuple[int, ...]:
    """The layers of each stage with which the fullest rank holds less: from its last stage with more than one layer, a layer goes
    to the first stage of the emptiest rank, as long as that helps. `peaks_of` has the bytes of the ranks that it is given.
    """
    of_rank = _stages_of(cut.schedule, cut.pp, len(cut.layers))
    peaks = [*peaks_of(cut, range(cut.pp))]
    while True:
        full, empty = max(range(cut.pp), key=lambda r: peaks[r]), min(range(cut.pp), key=lambda r: peaks[r])
        layers = list(cut.layers)
        giving = [at for at in of_rank[full] if layers[at] > 1]
        if not giving or full == empty:
            return cut.layers
        layers[giving[-1]] -= 1
        layers[of_rank[empty][0]] += 1
        moved, now = replace(cut, layers=tuple(layers)), [*peaks]
        now[full], now[empty] = peaks_of(moved, (full, empty))  # those of the others do not change
        if max(now) >= max(peaks):
            return cut.layers
        cut, peaks = moved, now


def least_seconds(
    candidate: Candidate, stages: Sequence[StageTimes], gathered: Sequence[float], reduced: Sequence[float]
) -> float:
    """What the forwards and backwards of a step take at least, as `pipeline_seconds` counts: a rank waits for the stages before
    its first, computes all microbatches, and then waits for those stages' last backwards.
    """
    kind = SCHEDULES[candidate.schedule]
    drains = candidate.schedule in WHOLE_BACKWARD
    work = [0.0] * candidate.pp
    waits = [0.0] * candidate.pp
    before = 0.0
    for at, one in enumerate(stages):
        rank = kind.rank_of(at, candidate.pp)
        if not work[rank]:
            waits[rank] = before
        work[rank] += one.forward + one.backward
        before += one.forward + (one.backward if drains else 0.0)
    longest = max(w + candidate.microbatches * each for w, each in zip(waits, work, strict=True))
    return longest + _once(candidate, stages, gathered, reduced)


def pipeline_seconds(
    candidate: Candidate,
    stages: Sequence[StageTimes],
    gathered: Sequence[float],
    reduced: Sequence[float],
    message: float,
) -> float:
    """The seconds of the forwards and backwards of a step. `gathered` and `reduced` are the seconds of FSDP's collectives of each
    stage, which come once, and `message` those of a message.
    """
    kind = SCHEDULES[candidate.schedule]
    work = [0.0] * candidate.pp
    for at, one in enumerate(stages):
        work[kind.rank_of(at, candidate.pp)] += one.forward + one.backward
    few = _few(candidate)
    costs = ActionCosts(
        tuple(one.forward for one in stages),
        tuple(one.backward / 2 for one in stages),
        tuple(one.backward / 2 for one in stages),
        {(a, b): message for a in range(len(stages)) for b in (a - 1, a + 1) if 0 <= b < len(stages)},
    )
    done = replay(_order(candidate.schedule, candidate.pp, candidate.stages_per_rank, few), costs).length
    return done + (candidate.microbatches - few) * max(work) + _once(candidate, stages, gathered, reduced)


def _once(
    candidate: Candidate, stages: Sequence[StageTimes], gathered: Sequence[float], reduced: Sequence[float]
) -> float:
    """The seconds of FSDP's collectives of the slowest rank that hide behind nothing: they come once a step."""
    kind = SCHEDULES[candidate.schedule]
    once = [0.0] * candidate.pp
    for at, one in enumerate(stages):
        # What does not hide behind the first forward, or the last backward.
        once[kind.rank_of(at, candidate.pp)] += max(gathered[at] - one.forward, gathered[at] / 8) + max(
            reduced[at] - one.backward, reduced[at] / 8
        )
    return max(once)


def _few(candidate: Candidate) -> int:
    few = min(candidate.microbatches, ROUNDS * candidate.pp)
    kind = SCHEDULES[candidate.schedule]
    while kind.misfit(candidate.pp, candidate.stages_per_rank, few) is not None:
        few += 1
    return min(few, candidate.microbatches)


@functools.lru_cache(ORDERS)
def _order(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    return SCHEDULES[schedule].order(ranks, stages_per_rank, microbatches)


@dataclass(frozen=True)
class _Moment:
    """What a rank holds at a moment: by stage the microbatches whose backward has not begun, and those of which the second half
    of backward is left; and the stages that have gradients.
    """

    whole: tuple[tuple[int, int], ...]
    halves: tuple[tuple[int, int], ...]
    graded: frozenset[int]


@functools.cache
def _held(
    schedule: str, ranks: int, stages_per_rank: int, microbatches: int
) -> tuple[tuple[_Moment, ...], ...]:
    """Of each rank the moments of a step at which it may hold most: of those with gradients of the same stages, those at which
    most microbatches are held.
    """
    return tuple(_most(actions) for actions in _order(schedule, ranks, stages_per_rank, microbatches))


def _most(actions: Sequence[Action]) -> tuple[_Moment, ...]:
    whole: Counter[int] = Counter()
    halves: Counter[int] = Counter()
    graded: set[int] = set()
    most: dict[tuple[frozenset[int], bool], tuple[tuple[int, int], _Moment]] = {}

    def note() -> None:
        each = whole.total(), halves.total()
        for first in (False, True):
            key, score = (frozenset(graded), first), (each if first else (sum(each), each[1]))
            if key not in most or score > most[key][0]:
                held = _Moment(tuple(whole.items()), tuple(halves.items()), key[0])
                most[key] = score, held

    for action in actions:
        if action.kind is FORWARD:
            whole[action.stage] += 1
            note()
        elif action.kind is BACKWARD_INPUT:
            whole[action.stage] -= 1
            halves[action.stage] += 1
            note()
        else:
            (whole if action.kind is BACKWARD else halves)[action.stage] -= 1
            graded.add(action.stage)
            note()
    return tuple({held: None for _, held in most.values()})


LOADS = 4096
"""Cuts of the layers whose loads are kept."""


@dataclass(frozen=True)
class _Load:
    """What a rank holds, in layers: in all its stages, and at each moment at which it may hold most. `ends` are halves of what
    lies outside the layers, one on the first stage and one on the last. Of a moment there are the layers of the microbatches
    whose backward has not begun, of those of which the second half is left, the layers and the ends that have gradients, and
    whether a second half adds whole gradients to those that are there.
    """

    layers: int
    ends: float
    moments: tuple[tuple[int, int, int, float, bool], ...]


@functools.lru_cache(LOADS)
def _loads(
    schedule: str, ranks: int, stages_per_rank: int, microbatches: int, layers: tuple[int, ...]
) -> tuple[_Load, ...]:
    """The loads of all ranks."""
    ends = [0.5 if stage in (0, len(layers) - 1) else 0.0 for stage in range(len(layers))]

    def of(moment: _Moment) -> tuple[int, int, int, float, bool]:
        return (
            sum(layers[stage] * n for stage, n in moment.whole),
            sum(layers[stage] * n for stage, n in moment.halves),
            sum(layers[stage] for stage in moment.graded),
            sum(ends[stage] for stage in moment.graded),
            bool(moment.graded) and any(n for _, n in moment.halves),
        )

    return tuple(
        _Load(
            sum(layers[s] for s in own), sum(ends[s] for s in own), tuple({of(one): None for one in moments})
        )
        for own, moments in zip(
            _stages_of(schedule, ranks, len(layers)),
            _held(schedule, ranks, stages_per_rank, microbatches),
            strict=True,
        )
    )


def rank_peaks(
    candidate: Candidate,
    traced: ClassTrace,
    units: UnitBytes,
    message: int,
    ranks: Sequence[int],
    part: float = 1.0,
) -> list[int]:
    """About the peak of memory of these ranks, with this part of the activations: their states, parameters gathered for the step
    and their gradients whole, the activations of the microbatches in flight, and what a layer or the head needs while it runs.
    """
    stages, rows = len(candidate.layers), part * candidate.rows / traced.rows
    before = traced.spots[0].use
    each = (before["parameters"] + before["optimizer"]) * traced.shards / max(traced.traced_parameters, 1)
    # Without a limit on what is in flight, that is the whole batch.
    count = candidate.microbatches if candidate.schedule == "gpipe" else _few(candidate)
    running, head = (work * rows for work in traced.workspace)
    lasts = before["buffers"] + before["batch"] * rows * candidate.microbatches + 2.0 * message
    loads = _loads(candidate.schedule, candidate.pp, candidate.stages_per_rank, count, candidate.layers)
    last = SCHEDULES[candidate.schedule].rank_of(stages - 1, candidate.pp)
    # Of a layer, and of what lies outside: the bytes of its states and gathered parameters, and of its gradients.
    graded = units.layer[2] + units.experts[2], units.others[2]
    kept = 1.0 if candidate.accumulate > 1 else 0.0
    lasting = [
        (numel * each + kept * gradients) / candidate.shards + gathered
        for numel, gathered, gradients in zip(
            traced.numel, (units.layer[0] + units.experts[0], units.others[0]), graded, strict=True
        )
    ]

    def peak(rank: int) -> int:
        load = loads[rank]
        work = max(running, head) if rank == last else running
        most = max(
            (whole + HALF * halves) * traced.layer * rows
            + layers * graded[0]
            + ends * graded[1]
            # A rank runs one half of a backward at a time: the second adds whole gradients to those that are there.
            + max(work, traced.whole_weights if adds else 0)
            for whole, halves, layers, ends, adds in load.moments
        )
        return round(lasts + load.layers * lasting[0] + load.ends * lasting[1] + most)

    return [peak(rank) for rank in ranks]


@functools.cache
def _stages_of(schedule: str, ranks: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank."""
    kind = SCHEDULES[schedule]
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    for stage in range(stages):
        of_rank[kind.rank_of(stage, ranks)].append(stage)
    return tuple(map(tuple, of_rank))
