"""local-random: a module draws random numbers of each rank's own."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer.styles.base import Sharding, Target, implements


class LocalRandom(ParallelStyle):
    """Independent draws on the ranks of one axis: see `parallelizer.random_numbers`."""

    def __init__(self, axis: str) -> None:
        super().__init__()
        self.axis = axis

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        from parallelizer.random_numbers import draw_apart

        draw_apart(module, device_mesh, self.axis)
        return module


@implements("local-random")
def local_random(target: Target) -> Sharding:
    """Dropout of what is split over the axis: each rank drops of its own part, independently of the others."""
    return Sharding(LocalRandom(target.axis), (target.axis,))
