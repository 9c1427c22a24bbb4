"""Bounds that never exceed the truth: what a candidate holds and takes at least."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.propose.search.candidate import NO_CHECKPOINT, Candidate
from parallelizer.propose.search.class_trace import ClassTrace
from parallelizer.propose.search.layer_times import MIDDLE
from parallelizer.simulate.time.constants import FITTED
from parallelizer.simulate.time.machine import Machine
from parallelizer.simulate.time.price import total_flops

WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved-1f1b")
"""Schedules whose first rank computes nothing while a first and a last microbatch are on the others."""


def state_bytes(model: nn.Module) -> int:
    """The parameters, and the gradients of those that are trained: both are there at the end of backward."""
    return sum(
        p.numel() * p.element_size() * (2 if p.requires_grad else 1)
        for p in dict.fromkeys(model.parameters())
    )


def memory_bound(candidate: Candidate, states: int) -> int:
    """The bytes that the fullest rank holds at least: the states, divided by all axes that may shard them."""
    return states // (candidate.pp * candidate.shards * candidate.tp)


def at_least(candidate: Candidate) -> Candidate:
    """A candidate that takes no longer by the clock: it computes nothing twice, and splits no sequence, if whole ones can be
    dealt out over the same ranks instead.
    """
    plain = replace(candidate, checkpoint=NO_CHECKPOINT, share=1.0)
    if candidate.cp == 1:
        return plain
    rows = max(candidate.rows // candidate.cp, 1)
    own = candidate.rows * candidate.accumulate * candidate.microbatches
    parts, rest = divmod(own, candidate.cp * rows)
    if rest or not parts:
        return plain
    whole = replace(plain, cp=1, dp_shard=candidate.shards, rows=rows, method="")
    if candidate.pp == 1:
        return replace(whole, accumulate=parts)
    fits = SCHEDULES[candidate.schedule].misfit(candidate.pp, candidate.stages_per_rank, parts) is None
    return replace(whole, microbatches=parts) if fits and parts >= candidate.pp else plain


def time_bound(candidate: Candidate, flops: float, rate: float) -> float:
    """The seconds of a step at least: `flops`, the model's own of the global batch, on all ranks at `rate`, without waiting for
    anything but half of the bubble that a schedule with whole backwards has where all stages are equal: unequal stages may hide
    a part of it.
    """
    if not rate:
        return 0.0
    seconds = flops / (candidate.mesh.world_size * rate)
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
        reached = 1.0 if machine.measured else FITTED.gemm * machine.power**FITTED.power
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
