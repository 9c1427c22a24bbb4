"""The stages of a pipeline in closed form: how the layers are cut, how long the schedule takes, and what its ranks hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parallelizer.language.pipeline.actions import Order
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.replay import ActionCosts, replay
from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.class_trace import ClassTrace
from parallelizer.propose.search.layer_times import UnitBytes

ROUNDS = 2
"""Microbatches for each rank that are replayed; each of the others takes what the slowest rank computes."""

ORDERS = 32
"""Orders that are kept: each has an object for every action."""

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


def level_layers(cut: Candidate, peaks_of: Callable[[Candidate], Sequence[int]]) -> tuple[int, ...]:
    """The layers of each stage with which the fullest rank holds less: from its last stage with more than one layer, a layer goes
    to the first stage of the emptiest rank, as long as that helps. `peaks_of` has the bytes of each rank.
    """
    kind = SCHEDULES[cut.schedule]
    peaks = peaks_of(cut)
    while True:
        full, empty = max(range(cut.pp), key=lambda r: peaks[r]), min(range(cut.pp), key=lambda r: peaks[r])
        layers = list(cut.layers)
        of_rank = {
            rank: [at for at in range(len(layers)) if kind.rank_of(at, cut.pp) == rank]
            for rank in (full, empty)
        }
        giving = [at for at in of_rank[full] if layers[at] > 1]
        if not giving or full == empty:
            return cut.layers
        layers[giving[-1]] -= 1
        layers[of_rank[empty][0]] += 1
        moved = replace(cut, layers=tuple(layers))
        now = peaks_of(moved)
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


@functools.cache
def _live(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[int, ...]:
    """The most microbatches of each stage that its rank holds, at the moment when the rank holds most in all."""
    found = [0] * (ranks * stages_per_rank)
    for actions in _order(schedule, ranks, stages_per_rank, microbatches):
        held: dict[int, int] = {}
        count = most = 0
        for action in actions:
            change = {"F": 1, "I": 0}.get(action.kind, -1)
            held[action.stage] = held.get(action.stage, 0) + change
            count += change
            if count > most:
                most = count
                for stage, here in held.items():
                    found[stage] = here
    return tuple(found)


def rank_peaks(
    candidate: Candidate, traced: ClassTrace, units: UnitBytes, message: int, part: float = 1.0
) -> list[int]:
    """About the peak of memory of each rank, with this part of the activations: its states, its parameters gathered and their
    gradients whole for the step, the activations of the microbatches in flight, and what a layer or the head needs while it runs.
    """
    kind, stages = SCHEDULES[candidate.schedule], len(candidate.layers)
    rows = part * candidate.rows / traced.rows
    before = traced.spots[0].use
    each = (before["parameters"] + before["optimizer"]) * traced.shards / max(traced.traced_parameters, 1)
    # Without a limit on what is in flight, that is the whole batch.
    count = candidate.microbatches if candidate.schedule == "gpipe" else _few(candidate)
    live = _live(candidate.schedule, candidate.pp, candidate.stages_per_rank, count)
    running, head = (work * rows for work in traced.workspace)
    lasts = before["buffers"] + before["batch"] * rows * candidate.microbatches + 2.0 * message
    totals = [lasts] * candidate.pp
    for stage, layers in enumerate(candidate.layers):
        end = stage in (0, stages - 1)
        numel = layers * traced.numel[0] + (traced.numel[1] / 2 if end else 0)
        whole = layers * (units.layer[0] + units.experts[0]) + (units.others[0] / 2 if end else 0)
        totals[kind.rank_of(stage, candidate.pp)] += (
            numel * each / candidate.shards
            + 3 * whole  # in 16 bits, and the gradients in 32
            + live[stage] * layers * traced.layer * rows
        )
    last = kind.rank_of(stages - 1, candidate.pp)
    return [
        round(total + (max(running, head) if rank == last else running)) for rank, total in enumerate(totals)
    ]
