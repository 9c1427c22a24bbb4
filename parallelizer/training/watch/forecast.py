"""The dry run's prediction for a run: computed in the parent, stored by rank 0, shown during the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelizer.configuration.setup import Setup
from parallelizer.configuration.validate import validated
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.record.flops import step_flops
from parallelizer.simulate.record.planned import Planned, planned_of
from parallelizer.styles.application import Program
from parallelizer.training.settings import Settings


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
    setup: Setup, program: Program, settings: Settings, nodes: Sequence[int] | None = None
) -> tuple[Forecast, tuple[Diagnostic, ...]]:
    """Validate the program, as `parallelizer validate` does; `nodes` are the numbers of ranks on each node, where somebody
    has dealt them out. Returns what is expected of the run, and what was found wrong.

    A step that cannot be traced is trained all the same: what the plan is to blame for has been found by following it.
    """
    peak = _peak_flops(setup) if settings.compare else None
    model = setup.build_model()
    validation = validated(setup, program, model, nodes=nodes)
    loss = setup.loss()
    planned, reason = None, ""
    if settings.compare and validation.trace is not None:
        planned = planned_of(validation.trace)
    elif settings.compare:
        reason = next((d.message for d in validation.found if d.code == "trace-failed"), "it was not traced")
    flops = step_flops(program, setup.build_model(), setup.workload, loss) if peak else None
    return Forecast(planned, reason, flops, peak), validation.found


def _peak_flops(setup: Setup) -> float | None:
    """Dense products of matrices in bfloat16, as the hardware's datasheet has them, by all ranks together. A CPU that
    stands in for a GPU has no such figure.
    """
    tflops = setup.hardware.get("bf16_tflops")
    return float(tflops) * 1e12 * setup.mesh.world_size if tflops and setup.device == "cuda" else None
