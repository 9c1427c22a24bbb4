"""How long the proof of a tiny form should take on this machine."""

from __future__ import annotations

import math
import os

from parallelizer.proof.prove import MAX_RANKS
from parallelizer.proof.subject import Subject
from parallelizer.simulate.record.flops import step_flops

RUNS = 20
"""Steps' worth of floating-point operations that a proof computes: three unsharded runs and the ranks, a few steps each."""

FLOPS = 2e9
"""Operations in float64 that a core is taken to do in a second, measured on the small products of a tiny model."""

UNTRACED = 60
"""Operations that each token is taken to cost for each parameter where they cannot be counted: ten times those of linear layers,
forward and backward.
"""

START, RANK = 3.0, 2.0
"""Seconds until a proof's processes compute, and what each rank adds to them on a core."""


def why_not_within(seconds: float, small: Subject, *, force: bool = False) -> str | None:
    """Why the proof of a tiny form is not known to take less than so many seconds; None where it is. Raises PlanError where
    the plan is refused for the tiny form, unless `force`.
    """
    if small.mesh.world_size > MAX_RANKS:
        return f"its proof takes {small.mesh.world_size} ranks"
    expected = expected_seconds(small, force=force)
    if expected is None:
        return "how long its proof takes is not known"
    if expected < seconds:
        return None
    return (
        f"its proof should take about {f'{expected / 60:.0f} min' if expected >= 90 else f'{expected:.0f} s'}"
    )


def expected_seconds(small: Subject, *, force: bool = False) -> float | None:
    """Seconds that the proof of a tiny form should take on this machine, by the operations of its step, or by its parameters
    where values decide the model's course; None without a workload. Raises PlanError where the plan is refused for the tiny form.
    """
    if small.workload is None:
        return None
    model = small.build()
    program = small.compile(model, force=force)
    flops = step_flops(program, model, small.workload, small.loss)
    if flops is None:  # values decide the model's course, so that it was not traced
        flops = UNTRACED * sum(p.numel() for p in model.parameters()) * small.tokens
    cores = min(os.cpu_count() or 1, small.mesh.world_size)
    return START + RANK * math.ceil(small.mesh.world_size / cores) + RUNS * flops / (FLOPS * cores)
