"""The form of what a unit returns: its structure, shapes and placements, without values.

A stage knows the modules of other stages only as stand-ins. What a stand-in returns has the form that the real module
returned on its stage, with the tensors that were received in their places. All other tensors are zeros that take no
memory: nothing of this stage depends on their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from parallelizer.torch_private import tree_leaves, tree_map_leaves

Forms = dict[tuple[str, int], Any]
"""What each call of each unit returned, with a `TensorForm` for each tensor, by unit and index of the call."""


@dataclass(frozen=True)
class TensorForm:
    """A tensor's local shape, dtype and whether it wants a gradient. A DTensor also has its placements on a mesh of the
    `axes`, and its global shape and stride.
    """

    shape: torch.Size
    dtype: torch.dtype
    wants_gradient: bool
    axes: tuple[str, ...] | None = None
    placements: tuple[Placement, ...] = ()
    whole_shape: torch.Size | None = None
    whole_stride: tuple[int, ...] | None = None

    def wrapped(self, local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The tensor over its local part, on the sub-mesh of its axes."""
        if self.axes is None:
            return local
        return DTensor.from_local(
            local,
            _submesh(mesh, self.axes),
            self.placements,
            run_check=False,
            shape=self.whole_shape,
            stride=self.whole_stride,
        )

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """The local part of a tensor, or of a gradient of it, contiguous. Collective where a DTensor lies otherwise."""
        if isinstance(value, DTensor):
            if self.placements and tuple(value.placements) != self.placements:
                value = value.redistribute(placements=self.placements)
            value = value.to_local()
        return value.contiguous()

    def zeros(self, device: torch.device) -> torch.Tensor:
        """The local part as zeros that take no memory."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)


def root_of(sent: torch.Tensor) -> torch.Tensor:
    """What backward begins at for a tensor that was sent: a tensor of the shape of its local part, without values and memory,
    whose gradient is the tensor's. The tensor itself is free once it has arrived.
    """
    root: torch.Tensor = _Root.apply(sent.to_local() if isinstance(sent, DTensor) else sent)
    return root


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(sent.shape, [0] * sent.ndim, dtype=sent.dtype, device=sent.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def form_of(output: Any) -> Any:
    """An output with a `TensorForm` for each tensor, and None for what neither is a tensor nor a plain value."""
    return tree_map_leaves(_leaf_form, output)


def filled(form: Any, tensor: Callable[[int, TensorForm], torch.Tensor]) -> Any:
    """An output of the form, with `tensor(leaf, form)` for each tensor."""
    number = iter(range(len(tree_leaves(form))))

    def fill(leaf: Any) -> Any:
        at = next(number)
        return tensor(at, leaf) if isinstance(leaf, TensorForm) else leaf

    return tree_map_leaves(fill, form)


def _leaf_form(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        local = leaf.to_local()
        return TensorForm(
            local.shape,
            local.dtype,
            leaf.requires_grad,
            tuple(leaf.device_mesh.mesh_dim_names or ()),
            tuple(leaf.placements),
            leaf.shape,
            tuple(leaf.stride()),
        )
    if isinstance(leaf, torch.Tensor):
        return TensorForm(leaf.shape, leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, (bool, int, float, str)) else None


def _submesh(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    return mesh[axes if len(axes) > 1 else axes[0]]
