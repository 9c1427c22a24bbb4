"""What the dry run says of the run that begins: looked up in the parent, kept by rank 0, shown while it runs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import parallelizer as pz
from parallelizer.checks.layout_flow import following
from parallelizer.diagnostics import Diagnostic, PlanError
from parallelizer.simulate.flops import step_flops
from parallelizer.simulate.planned import Planned, plan_step
from recipes.settings import Settings


@dataclass(frozen=True)
class Forecast:
    """What rank 0's step should send and hold; `reason` is why it is not known. `flops` are those of the global batch,
    on all ranks, and `peak_flops` what all their devices can do in a second, where the hardware is known.
    """

    planned: Planned | None = None
    reason: str = ""
    flops: int | None = None
    peak_flops: float | None = None

    def mfu(self, seconds: float) -> float | None:
        """The share of the devices' peak that a step of so many seconds has used for the model; None if it is not
        known.
        """
        if not self.flops or not self.peak_flops or seconds <= 0:
            return None
        return self.flops / (seconds * self.peak_flops)


def look_ahead(
    setup: pz.Setup, program: pz.Program, settings: Settings
) -> tuple[Forecast, tuple[Diagnostic, ...]]:
    """Follow one step, and with `train.compare` trace it, beside each other, on fake worlds in children of this process.
    Returns what is expected of the run, and what was found wrong: see `parallelizer validate`.

    A step that cannot be traced is trained all the same: what the plan is to blame for has been found by following it.
    """
    model = setup.build_model()
    with ExitStack() as beside:
        findings = beside.enter_context(following(setup, program, model))
        planned, reason = None, ""
        if settings.compare:
            try:
                planned = plan_step(program, setup.build_model(), setup.recipe())
            except PlanError as error:
                reason = error.diagnostics[0].message
        found = findings()
    peak = _peak_flops(setup) if settings.compare else None
    flops = step_flops(program, setup.build_model(), setup.workload, setup.loss()) if peak else None
    return Forecast(planned, reason, flops, peak), found


def _peak_flops(setup: pz.Setup) -> float | None:
    """Dense products of matrices in bfloat16, as the hardware's datasheet has them, by all ranks together. A CPU that
    stands in for a GPU has no such figure.
    """
    tflops = setup.hardware.get("bf16_tflops")
    return float(tflops) * 1e12 * setup.mesh.world_size if tflops and setup.device == "cuda" else None
