"""The constants of the clock. All of them are here; measured kernels and datasheets are elsewhere.

`python -m benchmarks.published --fit` fits those of FITTED_NAMES to the published runs of benchmarks/published/runs.yaml, and
cross-validates them by source. The others were measured by other means and are not fitted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """What a step on a GPU depends on beyond measured kernels and datasheets.

    Fitted to published runs:

    - `sustained`: the share of a measured kernel's rate that a training reaches, in products and attention: a hot device at its
      power limit, between other kernels.
    - `attention_backward`: the rate of attention's backward by that of its forward.
    - `memory`: the share of the memory's datasheet bandwidth that operators bound by it reach.
    - `contention`: the share of its rate that a kernel loses while a collective runs beside it: the collective's own kernels take
      processors and memory bandwidth.
    - `power`: by this power of the device's power limit the rate of products and attention falls below that of the measured
      device.
    - `straggling`: the share by which a step grows with each doubling of the nodes, because the slowest of more devices sets the
      pace.

    From elsewhere:

    - `network`: the share of a network adapter's datasheet rate that collectives between nodes reach. NCCL's authors expect 46 to
      48 of 50 GB/s (NVIDIA/nccl-tests#290).
    - `spread`: the standard deviation of the logarithm of published by predicted time, over sources that the fit has not seen.
    """

    sustained: float = 0.912
    attention_backward: float = 0.781
    memory: float = 0.806
    contention: float = 0.116
    power: float = 0.553
    straggling: float = 0.0065
    network: float = 0.94
    spread: float = 0.09


FITTED = Constants()
FITTED_NAMES = ("sustained", "attention_backward", "memory", "contention", "power", "straggling")

KERNEL_SECONDS = 2.5e-6
"""The shortest time of a kernel, from the end of the one before."""
HOP_SECONDS = 10e-6
"""What a collective takes at least for each node on its ring."""
CAST_BYTES = 3
"""Bytes moved for each element that is quantised, read in 16 bits and written in 8; its greatest value is found before."""

HOST_SECONDS = 8e-6
"""What the host takes to ask for one operator of code that is not compiled, autograd included."""
COMPILED_HOST = 0.25
"""The share of HOST_SECONDS that a kernel of compiled code takes."""
MODULE_SECONDS = 4e-6
"""What the host takes to call a module, with its hooks."""
DTENSOR_SECONDS = 120e-6
"""What the host takes to dispatch an operator on DTensors, beyond its local operators. From eager steps under tp on
an H100, whose host had other work too.
"""
COMPILED_DTENSOR = 0.52
"""The share of DTENSOR_SECONDS that an operator on DTensors takes in compiled code: nothing dispatches it, but the guards of a
compiled module and the wrapping of its inputs and results grow with their number. From the compiled step of tp8 in docs/gpu.md.
"""

RESERVED = 1.25
"""What CUDA's caching allocator reserves by what is in use at the peak: 1.26 is the median of published runs, 1.23 that of
rehearsals on an H200 (docs/gpu.md), where it was 1.07 to 1.43. Neither the largest tensors nor the size of the step tell where in
this range a run lies.
"""

FP32_BY_BF16 = 1 / 15
"""The rate of float32's products by that of bfloat16, of a device whose datasheet rate for float32 is not given."""
