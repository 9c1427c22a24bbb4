"""Other values for parameters and buffers while a module's own forward runs: the local shards of DTensors,
slices, or another dtype.

The registered parameters do not change, so that optimizers, FSDP, clipping and state dicts see one kind of
tensor. Only attribute look-ups inside forward return the other value. Gradients flow back through the
operation that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from parallelizer.styles.wrap_forward import wrap_forward

View = Callable[[torch.Tensor], torch.Tensor]


def run_on_views(module: nn.Module, views: Mapping[str, View]) -> None:
    """Let forward see `views[name](tensor)` in place of each parameter or buffer named."""

    def around(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            for name, view in views.items():
                # An instance attribute is found before a registered parameter, and leaves it untouched.
                module.__dict__[name] = view(getattr(module, name))
            return forward(*args, **kwargs)
        finally:
            for name in views:
                module.__dict__.pop(name, None)

    wrap_forward(module, around)


class TermOfSum(torch.autograd.Function):
    """One of so many equal terms of a sum. Its gradient is that of the sum, which every rank has."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, terms: int) -> torch.Tensor:
        return whole / terms

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def run_on_local_parameters(
    module: nn.Module, gradients: Mapping[str, Sequence[Placement]], *, terms: int = 1
) -> None:
    """Let forward see the local shards of DTensor parameters, divided by `terms`.

    `gradients` says how the local gradient of each lies on the parameter's mesh: partial where every rank of an axis
    contributes a part, replicate where all compute the same. With `terms`, each rank adds its term to a sum over the ranks, and
    has the gradient of the sum.
    """

    def local(placements: Sequence[Placement]) -> View:
        def view(param: torch.Tensor) -> torch.Tensor:
            part = param.to_local(grad_placements=placements) if isinstance(param, DTensor) else param
            return part if terms == 1 else TermOfSum.apply(part, terms)

        return view

    run_on_views(module, {name: local(placements) for name, placements in gradients.items()})


def slice_buffers(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Sequence[Placement]], *, local: bool = True
) -> None:
    """Let forward see this rank's slices of buffers, which stay whole; as DTensors if not `local`."""

    def sliced(placement: Sequence[Placement]) -> View:
        def view(buffer: torch.Tensor) -> torch.Tensor:
            # Nothing is sent; that the slice differs from rank to rank is seen from the conversion.
            part = DTensor.from_local(buffer, mesh, run_check=False).redistribute(placements=placement)
            return part.to_local() if local else part

        return view

    run_on_views(module, {name: sliced(placement) for name, placement in placements.items()})
