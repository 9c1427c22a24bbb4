"""What a candidate holds and takes at least. `memory_bound` and `time_bound` never exceed a dry run; `no_slower` names candidates
that the clock prices no higher.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.propose.search.candidate import NO_CHECKPOINT, Candidate
from parallelizer.propose.search.class_trace import ClassTrace
from parallelizer.propose.search.layer_times import MIDDLE
from parallelizer.propose.search.stages import WHOLE_BACKWARD
from parallelizer.simulate.time.constants import FITTED
from parallelizer.simulate.time.machine import Machine
from parallelizer.simulate.time.price import total_flops


def state_bytes(model: nn.Module) -> int:
    """The parameters, and the gradients of those that are trained: both are there at the end of backward."""
    return sum(
        p.numel() * p.element_size() * (2 if p.requires_grad else 1)
        for p in dict.fromkeys(model.parameters())
    )


def memory_bound(candidate: Candidate, states: int) -> int:
    """The bytes that the fullest rank holds at least: the states, divided by all axes that may shard them."""
    return states // (candidate.pp * candidate.shards * candidate.tp)


def no_slower(candidate: Candidate) -> Iterator[Candidate]:
    """Candidates that take no longer by the clock, the nearest first: with less split over cp, and without recomputation."""
    less: Candidate | None = candidate
    while less is not None:
        if less != candidate:
            yield less
        if less.checkpoint != NO_CHECKPOINT:
            yield replace(less, checkpoint=NO_CHECKPOINT, share=1.0)
        less = with_whole_sequences(less, less.cp // _factor(less.cp)) if less.cp > 1 else None


@functools.cache
def with_whole_sequences(candidate: Candidate, cp: int = 1) -> Candidate | None:
    """The candidate whose ranks of cp get sequences of their own instead, down to `cp`; None where the batch has not enough."""
    times = candidate.cp // cp
    rows = max(candidate.rows // times, 1)
    own = candidate.rows * candidate.accumulate * candidate.microbatches
    parts, rest = divmod(own, times * rows)
    if times == 1 or rest or not parts:
        return None
    method = candidate.method if cp > 1 else ""
    microbatches, accumulate = candidate.microbatches, parts
    if candidate.pp > 1:
        accumulate = candidate.accumulate
        microbatches, rest = divmod(parts, accumulate)
        if rest or microbatches < candidate.pp:
            return None
        kind = SCHEDULES[candidate.schedule]
        if kind.misfit(candidate.pp, candidate.stages_per_rank, microbatches) is not None:
            return None
    return replace(
        candidate, cp=cp, dp_shard=candidate.dp_shard * times, rows=rows, method=method, microbatches=microbatches,
        accumulate=accumulate,
    )  # fmt: skip


@functools.cache
def _factor(number: int) -> int:
    """The least above 1."""
    return next(n for n in range(2, number + 1) if number % n == 0)


def time_bound(candidate: Candidate, flops: float, rate: float) -> float:
    """The seconds of a step at least: `flops`, the model's own of the global batch, on all ranks at `rate`, without waiting for
    anything but the bubble.
    """
    return with_bubble(candidate, flops / (candidate.mesh.world_size * rate)) if rate else 0.0


def with_bubble(candidate: Candidate, seconds: float) -> float:
    """The seconds in which a rank computes, with half of the bubble that a schedule with whole backwards has where all stages are
    equal: unequal stages may hide a part of it.
    """
    if candidate.schedule in WHOLE_BACKWARD:
        waited = (candidate.pp - 1) / candidate.stages_per_rank / candidate.microbatches
        seconds *= 1 + waited / 2
    return seconds


def best_rate(machine: Machine, *, float8: bool = False) -> float:
    """The most floating-point operations that a device is taken to do in a second, of any product or attention; twice as many
    where products are made in eight bits.
    """
    rates = [0.0]
    found = machine.grid("bfloat16")
    if found is not None:
        grid, scale = found
        best = max(max(max(row) for row in plane) for plane in grid.tflops)
        reached = 1.0 if machine.measured else FITTED.sustained * machine.power**FITTED.power
        rates.append(best * scale * reached)
    for known in machine.table.attention.values():
        rates.append(max(known) * machine.scale)
    wide = machine.grid("float32")
    if wide is not None:
        grid, scale = wide
        rates.append(max(max(max(row) for row in plane) for plane in grid.tflops) * scale)
    return max(rates) * (2 if float8 else 1) * 1e12


def flops_of_batch(traced: ClassTrace, key: Candidate, batch: int) -> float:
    """The model's own operations for the global batch, by the line of a rank of the class `key`."""
    layer = total_flops([m for m in traced.line if traced.place(m.module) == MIDDLE])
    others = total_flops([m for m in traced.line if traced.place(m.module) is None])
    own = traced.layers * (layer[0] - layer[1]) + others[0] - others[1]
    return own * key.tp * key.cp * batch / traced.rows
