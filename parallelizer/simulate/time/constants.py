"""The constants of the clock that were fitted, each with its meaning. All of them are here.

`python -m benchmarks.published --fit` fits them to the published runs of benchmarks/published/runs.yaml, and cross-validates by
source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """What a step on a GPU depends on beyond measured kernels and datasheets.

    - `gemm`: the share of a measured product's rate that a training reaches: a hot device at its power limit, between other
      kernels.
    - `attention`: the share of the measured rate of the best attention that `F.scaled_dot_product_attention` reaches on GPUs
      since Hopper, where it runs FlashAttention 2.
    - `attention_backward`: the rate of attention's backward by that of its forward.
    - `memory`: the share of the memory's datasheet bandwidth that operators bound by it reach.
    - `network`: the share of a network adapter's datasheet rate that collectives between nodes reach.
    - `contention`: the share of its rate that a kernel loses while a collective runs beside it: the collective's own kernels take
      processors and memory bandwidth.
    - `power`: by this power of the device's power limit the rate of products falls below that of the measured device.
    - `early`: the share of today's rates that libraries reach on a device whose generation is new to them, as in 2023 on Hopper.
    - `straggling`: the share by which a step grows with each doubling of the nodes, because the slowest of more devices sets the
      pace.
    - `spread`: the standard deviation of the logarithm of published by predicted time, over sources that the fit has not seen.
    """

    gemm: float = 0.912
    attention: float = 0.404
    attention_backward: float = 0.688
    memory: float = 0.778
    network: float = 0.95
    contention: float = 0.148
    power: float = 0.425
    early: float = 0.86
    straggling: float = 0.0034
    spread: float = 0.12


FITTED = Constants()

KERNEL_SECONDS = 2.5e-6
"""The shortest time of a kernel, from the end of the one before."""
HOST_SECONDS = 8e-6
"""What the host takes to ask for one operator of code that is not compiled."""
HOP_SECONDS = 10e-6
"""What a collective takes at least for each node on its ring."""
