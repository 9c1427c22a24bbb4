"""The stages of a pipeline in closed form: how the layers are cut, how long the schedule takes, and what its ranks hold."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallelizer.language.pipeline.actions import Order
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.replay import ActionCosts, replay
from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.class_trace import ClassTrace
from parallelizer.propose.search.layer_times import UnitBytes

ROUNDS = 4
"""Microbatches for each rank that are replayed; each of the others takes what the slowest rank computes."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a stage for one microbatch."""

    forward: float
    backward: float


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


def pipeline_seconds(
    candidate: Candidate,
    stages: Sequence[StageTimes],
    gathered: Sequence[float],
    reduced: Sequence[float],
    message: float,
    worse_than: float,
) -> float | None:
    """The seconds of the forwards and backwards of a step. `gathered` and `reduced` are the seconds of FSDP's collectives of each
    stage, which come once, and `message` those of a message. None where the slowest rank alone computes for longer than
    `worse_than`.
    """
    kind = SCHEDULES[candidate.schedule]
    work = [0.0] * candidate.pp
    once = [0.0] * candidate.pp
    for at, one in enumerate(stages):
        rank = kind.rank_of(at, candidate.pp)
        work[rank] += one.forward + one.backward
        # What does not hide behind the first forward, or the last backward.
        once[rank] += max(gathered[at] - one.forward, gathered[at] / 8) + max(
            reduced[at] - one.backward, reduced[at] / 8
        )
    slowest = max(work)
    if candidate.microbatches * slowest > worse_than:
        return None
    few = _few(candidate)
    costs = ActionCosts(
        tuple(one.forward for one in stages),
        tuple(one.backward / 2 for one in stages),
        tuple(one.backward / 2 for one in stages),
        {(a, b): message for a in range(len(stages)) for b in (a - 1, a + 1) if 0 <= b < len(stages)},
    )
    done = replay(_order(candidate.schedule, candidate.pp, candidate.stages_per_rank, few), costs).length
    return done + (candidate.microbatches - few) * slowest + max(once)


def _few(candidate: Candidate) -> int:
    few = min(candidate.microbatches, ROUNDS * candidate.pp)
    kind = SCHEDULES[candidate.schedule]
    while kind.misfit(candidate.pp, candidate.stages_per_rank, few) is not None:
        few += 1
    return min(few, candidate.microbatches)


@functools.cache
def _order(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    return SCHEDULES[schedule].order(ranks, stages_per_rank, microbatches)


@functools.cache
def _live(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """The most microbatches that a rank holds at once on each of its stages, at the moment when it holds most in all."""
    found = []
    for actions in _order(schedule, ranks, stages_per_rank, microbatches):
        held: dict[int, int] = {}
        most: dict[int, int] = {}
        for action in actions:
            held[action.stage] = held.get(action.stage, 0) + {"F": 1, "I": 0}.get(action.kind, -1)
            if sum(held.values()) > sum(most.values()):
                most = dict(held)
        found.append(tuple(most.get(stage, 0) for stage in range(ranks * stages_per_rank)))
    return tuple(found)


def rank_peaks(candidate: Candidate, traced: ClassTrace, units: UnitBytes, message: int) -> Iterator[int]:
    """About the peak of memory of each rank: its states, its parameters gathered and their gradients whole for the step, the
    activations of the microbatches in flight, and what a layer or the head needs while it runs.
    """
    kind, stages = SCHEDULES[candidate.schedule], len(candidate.layers)
    rows = candidate.rows / traced.rows
    before = traced.spots[0].use
    each = (before["parameters"] + before["optimizer"]) * traced.shards / max(traced.traced_parameters, 1)
    live = _live(candidate.schedule, candidate.pp, candidate.stages_per_rank, _few(candidate))
    running = _workspace(traced, "backward", layer=True) * rows
    head = max(_workspace(traced, phase, layer=False) for phase in ("loss", "backward")) * rows
    for rank in range(candidate.pp):
        total = before["buffers"] + before["batch"] * rows * candidate.microbatches + 2.0 * message
        work = running
        for stage in range(stages):
            if kind.rank_of(stage, candidate.pp) != rank:
                continue
            end = stage in (0, stages - 1)
            count = candidate.layers[stage]
            numel = count * traced.numel[0] + (traced.numel[1] / 2 if end else 0)
            total += numel * each / candidate.shards
            whole = count * (units.layer[0] + units.experts[0]) + (units.others[0] / 2 if end else 0)
            total += 3 * whole  # in 16 bits, and the gradients in 32
            total += live[rank][stage] * count * traced.layer * rows
            if stage == stages - 1:
                work = max(work, head)
        yield round(total + work)


def _workspace(traced: ClassTrace, phase: str, *, layer: bool) -> int:
    """What is in use in a phase beyond what lasts: the states, the gathered parameters and the layers' activations."""
    found = [
        spot.use["activations"] + spot.use["temporaries"] - 3 * traced.layer
        for spot in traced.spots
        if spot.phase == phase and (not layer or spot.held == 1.0)
    ]
    return max(found, default=0)
