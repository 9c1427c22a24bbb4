"""The ParallelStyle of shard-params, and of the other styles for which torch has no class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer.language import plan
from parallelizer.language.placement import to_torch
from parallelizer.styles.attributes import divide
from parallelizer.styles.divided_sizes import divide_sizes
from parallelizer.styles.layouts import Layouts, lay_out, lay_out_statement
from parallelizer.styles.packing import Packing, pack
from parallelizer.styles.parameter_views import View, run_on_local_parameters, run_on_views, slice_buffers
from parallelizer.styles.statements import MODULE, Statement, by_name_text, calls, dict_text
from parallelizer.styles.target import ParamPlacements


def place_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Mapping[str, Sequence[Placement]],
    source: int | None = 0,
) -> None:
    """Make the module's own parameters DTensors, placed as said for each dimension of the mesh.

    The values are those of rank `source` of each group; with None every rank takes its own.
    """
    for name, placement in placements.items():
        param = getattr(module, name)
        placed = distribute_tensor(param.detach(), mesh, placement, src_data_rank=source)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=param.requires_grad))


def run_on_head(module: nn.Module, mesh: DeviceMesh, dims: Mapping[str, int], *, heads: int) -> None:
    """Let forward see the features of one of `heads` heads: neighbouring ranks share one, and add its gradients up."""
    head = mesh.get_local_rank() * heads // mesh.size()

    def of_head(dim: int) -> View:
        def view(param: torch.Tensor) -> torch.Tensor:
            if isinstance(param, DTensor):
                gradient = [Partial() if p.is_replicate() else p for p in param.placements]
                param = param.to_local(grad_placements=gradient)
            size = param.shape[dim] // heads
            return param.narrow(dim, head * size, size)

        return view

    run_on_views(module, {name: of_head(dim) for name, dim in dims.items()})


class ShardParams(ParallelStyle):
    """Any parameters of one module as DTensors on one or two axes.

    With layouts, forward runs on DTensors between them; without, on the local shards. Buffers stay whole and plain, for
    state dicts and initializers; forward sees its rank's slices. `gradients` says how a replicated parameter's local
    gradient lies in the second case. `divide_sizes` are dimensions of arguments, by name, whose sizes forward reads divided.
    `heads`, with the dimensions `head_dims` of parameters that count their features: each rank computes one of so many
    heads, which are fewer than the ranks. In the second case forward reads the values divided by `terms`.
    """

    def __init__(
        self,
        params: ParamPlacements,
        *,
        axis: str = "tp",
        buffers: ParamPlacements | None = None,
        packed: Mapping[str, Packing] | None = None,
        divide: Mapping[str, int] | None = None,
        divide_sizes: Mapping[str, Sequence[int]] | None = None,
        layouts: Layouts | None = None,
        gradients: type[Placement] = Partial,
        heads: int | None = None,
        head_dims: Mapping[str, int] | None = None,
        terms: int = 1,
    ) -> None:
        super().__init__()
        self.params, self.axis, self.packed = params, axis, packed or {}
        self.buffers = buffers or {}
        self.divide, self.layouts, self.gradients = divide or {}, layouts, gradients
        self.divide_sizes = divide_sizes or {}
        self.heads, self.head_dims, self.terms = heads, head_dims or {}, terms

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = device_mesh.mesh_dim_names or (self.axis,)
        for name, packing in self.packed.items():
            pack(module, name, packing)
        place_parameters(module, device_mesh, _on(names, self.params), self.src_data_rank)
        for name, ranks in self.divide.items():
            divide(module, name, ranks)
        if self.divide_sizes:
            divide_sizes(module, self.divide_sizes, device_mesh[self.axis].size())
        if self.buffers:
            slice_buffers(module, device_mesh, _on(names, self.buffers), local=self.layouts is None)
        if self.layouts is not None:
            lay_out(module, device_mesh, **self.layouts.on(names, self.axis))
        elif self.params:
            run_on_local_parameters(module, self._local_gradients(names), terms=self.terms)
        if self.heads is not None:
            run_on_head(module, device_mesh, self.head_dims, heads=self.heads)
        return module

    def statements(self, axes: Sequence[str], mesh: str) -> Iterator[Statement]:
        """The same as plain Python, on a mesh of these axes that the variable `mesh` holds."""
        for name, packing in self.packed.items():
            yield calls(pack, f'"{name}"', repr(packing))
        if self.params:
            yield calls(place_parameters, mesh, by_name_text(_on(axes, self.params)))
        for name, ranks in self.divide.items():
            if "." in name:
                yield calls(divide, f'"{name}"', str(ranks))
            else:
                yield Statement(f"{MODULE}.{name} //= {ranks}", None)
        if self.divide_sizes:
            sizes = dict_text({name: str(dims) for name, dims in self.divide_sizes.items()})
            yield calls(divide_sizes, sizes, f'{mesh}["{self.axis}"].size()')
        if self.buffers:
            kept = () if self.layouts is None else ("local=False",)
            yield calls(slice_buffers, mesh, by_name_text(_on(axes, self.buffers)), *kept)
        if self.layouts is not None:
            yield lay_out_statement(self.layouts, axes, self.axis, mesh)
        elif self.params:
            terms = () if self.terms == 1 else (f"terms={self.terms}",)
            yield calls(run_on_local_parameters, by_name_text(self._local_gradients(axes)), *terms)
        if self.heads is not None:
            dims = dict_text({n: str(d) for n, d in self.head_dims.items()})
            yield calls(run_on_head, mesh, dims, f"heads={self.heads}")

    def _local_gradients(self, axes: Sequence[str]) -> dict[str, list[Placement]]:
        return {
            name: [self.gradients() if isinstance(p, Replicate) else p for p in placements]
            for name, placements in _on(axes, self.params).items()
        }


def _on(axes: Sequence[str], placements: ParamPlacements) -> dict[str, list[Placement]]:
    """Placements by name for each dimension of a mesh of these axes."""
    return {
        name: [to_torch(by_axis.get(axis, plan.REPLICATE)) for axis in axes]
        for name, by_axis in placements.items()
    }
