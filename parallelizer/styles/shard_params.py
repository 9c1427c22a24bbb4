"""The ParallelStyle behind shard-params, and behind the other styles where torch has no class that does
it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from parallelizer.placement import to_torch
from parallelizer.plan import REPLICATE, Placement
from parallelizer.styles import attributes
from parallelizer.styles.base import ParamPlacements
from parallelizer.styles.io import Layouts, hook_layouts
from parallelizer.styles.local import View, run_on_locals, run_on_views
from parallelizer.styles.packing import Packing


class ShardParams(ParallelStyle):
    """Any parameters of one module as DTensors on one or two axes.

    With layouts, forward runs on DTensors between them; without, on the local shards. Buffers stay whole and plain, for
    state dicts and whoever fills them; forward sees its rank's slices. `gradients` says how a
    replicated parameter's local gradient lies in the second case.
    """

    def __init__(
        self,
        params: ParamPlacements,
        *,
        axis: str = "tp",
        buffers: ParamPlacements | None = None,
        packed: Mapping[str, Packing] | None = None,
        divide: Mapping[str, int] | None = None,
        layouts: Layouts | None = None,
        gradients: type[TorchPlacement] = Partial,
    ) -> None:
        super().__init__()
        self.params, self.axis, self.packed = params, axis, packed or {}
        self.buffers = buffers or {}
        self.divide, self.layouts, self.gradients = divide or {}, layouts, gradients

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = device_mesh.mesh_dim_names or (self.axis,)
        for name, by_axis in self.params.items():
            param = getattr(module, name)
            placements = [to_torch(by_axis.get(a, REPLICATE)) for a in names]
            data = param.detach()
            if name in self.packed:
                data = self.packed[name].pack(data)
            local = distribute_tensor(data, device_mesh, placements, src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(local, requires_grad=param.requires_grad))
        for name, degree in self.divide.items():
            attributes.write(module, name, (attributes.read(module, name) or 0) // degree)
        if self.buffers:
            run_on_views(module, self._slices(device_mesh, names))
        if self.layouts is not None:
            hook_layouts(module, device_mesh, self.layouts, self.axis)
        elif self.params:
            run_on_locals(module, {n: self._gradient(by_axis, names) for n, by_axis in self.params.items()})
        return module

    def _slices(self, mesh: DeviceMesh, names: tuple[str, ...]) -> dict[str, View]:
        """By DTensor, though nothing is sent: who follows a step sees there that ranks get different values."""
        whole, local = [Replicate()] * len(names), self.layouts is None

        def view(placements: list[TorchPlacement]) -> View:
            def sliced(buffer: torch.Tensor) -> torch.Tensor:
                part = DTensor.from_local(buffer, mesh, whole, run_check=False).redistribute(
                    placements=placements
                )
                return part.to_local() if local else part

            return sliced

        return {
            n: view([to_torch(by_axis.get(a, REPLICATE)) for a in names])
            for n, by_axis in self.buffers.items()
        }

    def _gradient(self, by_axis: Mapping[str, Placement], names: tuple[str, ...]) -> list[TorchPlacement]:
        placements = [to_torch(by_axis.get(a, REPLICATE)) for a in names]
        return [self.gradients() if isinstance(p, Replicate) else p for p in placements]
