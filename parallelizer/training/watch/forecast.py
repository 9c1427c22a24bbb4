"""The dry run's prediction for a run: computed in the parent, stored by rank 0, shown during the run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from parallelizer.configuration.setup import Setup
from parallelizer.configuration.step_time import step_time
from parallelizer.simulate.record.flops import step_flops
from parallelizer.simulate.record.planned import Planned, planned_of
from parallelizer.simulate.time.price import total_flops
from parallelizer.simulate.validate import Validation
from parallelizer.styles.application import Program
from parallelizer.training.settings import Settings
from parallelizer.training.watch.peak import peak_of


@dataclass(frozen=True)
class Forecast:
    """What rank 0's step should send and hold; `reason` is why it is not known.

    `flops` are those of the global batch on all ranks, and `hidden_flops` those of them that a causal mask hides. `peak_flops` is
    what all their devices can do in a second, where the hardware is known, and `seconds` the predicted time of a step.
    """

    planned: Planned | None = None
    reason: str = ""
    flops: int | None = None
    peak_flops: float | None = None
    seconds: float | None = None
    hidden_flops: int = 0

    def mfu(self, seconds: float, *, causal: bool = False) -> float | None:
        """The share of the devices' peak that a step of so many seconds has used for the model; None if it is not
        known. All of attention is counted, as in PaLM; with `causal` without the half that a causal mask hides.
        """
        if not self.flops or not self.peak_flops or seconds <= 0:
            return None
        return (self.flops - (self.hidden_flops if causal else 0)) / (seconds * self.peak_flops)

    def of_devices(self, device: torch.device, ranks: int) -> Forecast:
        """With the peak of so many GPUs like this one, by its name, if no hardware was configured."""
        if not self.flops or self.peak_flops or device.type != "cuda":
            return self
        peak = peak_of(torch.cuda.get_device_name(device))
        return replace(self, peak_flops=None if peak is None else peak * ranks)


def forecast_of(
    setup: Setup, program: Program, model: nn.Module, settings: Settings, validation: Validation
) -> Forecast:
    """What is expected of the run, from the step that validating its program has traced. `model` is as it was compiled.

    A step that could not be traced is trained all the same: what the plan is to blame for has been found by following it.
    """
    if not settings.compare:
        return Forecast()
    peak, loss = _peak_flops(setup), setup.loss()
    planned, reason = None, ""
    if validation.trace is not None:
        planned = planned_of(validation.trace)
    else:
        reason = next((d.message for d in validation.found if d.code == "trace-failed"), "it was not traced")
    # A GPU that no configuration names tells its name to the rank: see `of_devices`.
    counted = peak is not None or setup.device == "cuda"
    flops = step_flops(program, model, setup.workload, loss) if counted else None
    time = step_time(setup, validation.trace)
    hidden = 0
    if time is not None:
        hidden = time.whole_attention
    elif validation.trace is not None:
        _, _, hidden = total_flops(validation.trace.line)
    seconds = None if time is None else time.seconds
    return Forecast(planned, reason, flops, peak, seconds, hidden * setup.mesh.world_size)


def _peak_flops(setup: Setup) -> float | None:
    """Dense products of matrices in bfloat16, as the hardware's datasheet has them, by all ranks together. A CPU that
    stands in for a GPU has no such figure.
    """
    tflops = setup.hardware.get("bf16_tflops")
    return float(tflops) * 1e12 * setup.mesh.world_size if tflops and setup.device == "cuda" else None
