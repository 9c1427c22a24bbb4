"""Bounds that never exceed the truth: what a candidate holds and takes at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from parallelizer.search.candidate import NO_CHECKPOINT, Candidate
from parallelizer.simulate.record.operators import Moment
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


def at_least(candidate: Candidate) -> Candidate:
    """A candidate that takes no longer by the clock: it computes nothing twice, and splits no sequence, if whole ones can be
    dealt out over the same ranks instead.
    """
    plain = replace(candidate, checkpoint=NO_CHECKPOINT, share=1.0)
    rows, rest = divmod(candidate.rows, candidate.cp)
    if candidate.cp == 1 or rest or not rows:
        return plain
    return replace(plain, cp=1, dp_shard=candidate.shards, rows=rows, method="")


def time_bound(candidate: Candidate, flops: float, machine: Machine) -> float:
    """The seconds of a step at least: `flops`, the model's own of the global batch, on all ranks at the best rate of the
    table. Nothing is computed twice, and nothing is waited for.
    """
    rate = best_rate(machine)
    return flops / (candidate.mesh.world_size * rate) if rate else 0.0


def best_rate(machine: Machine) -> float:
    """The most floating-point operations that a device is taken to do in a second, of any product or attention."""
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
    return max(rates) * 1e12


def flops_of_batch(line: Sequence[Moment], candidate: Candidate, rows: int, batch: int) -> float:
    """The model's own operations for the global batch, by the line of a rank that has `rows` rows on a candidate's tp and cp."""
    whole, again, _ = total_flops(line)
    return (whole - again) * candidate.tp * candidate.cp * batch / rows
