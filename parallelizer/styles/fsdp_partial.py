"""Gradients that FSDP reduces over the data ranks while they lie partial over other axes.

FSDP sums such a gradient before it reduces it: one all-reduce for each, in the dtype of computation, during backward. Sums
over axes can be exchanged. In a step of ours FSDP reduces each rank's own part, and the reduced gradient of the shard is a
DTensor that lies partial. The step sums it behind backward, in the dtype of the parameter. In loops of users' own FSDP sums as
ever: their hooks, clipping and optimizers may read the local part alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from parallelizer import torch_private


def summed_axes(gradient: Sequence[Placement], param: Sequence[Placement]) -> tuple[int, ...]:
    """The axes that a gradient is summed over to lie as its parameter; none if it also has to be cut or moved."""
    axes = []
    for axis, (before, after) in enumerate(zip(gradient, param, strict=True)):
        if type(before) is Partial and before.reduce_op == "sum" and after.is_replicate():
            axes.append(axis)
        elif before != after:
            return ()
    return tuple(axes)


_behind = False
"""Whether a step is running that sums partial gradients behind backward. Not a ContextVar: autograd has threads of its own."""


@contextmanager
def summed_behind() -> Iterator[None]:
    """Inside, FSDP reduces partial gradients as they are. Whoever enters calls `sum_partial` behind backward."""
    global _behind
    before, _behind = _behind, True
    try:
        yield
    finally:
        _behind = before


def keep_partial(unit: nn.Module) -> None:
    """From the next forward of `unit` on, let FSDP reduce partial gradients as they are, inside `summed_behind`.

    FSDP makes the parameters that forward sees at its first gather, and materialising a model replaces the sharded ones. So
    the hooks are looked after whenever the unit's forward begins, behind FSDP's own hook.
    """
    known: dict[DTensor, _FollowedParameter] = {}

    @torch.compiler.disable
    def attach(*_: Any) -> None:
        for shard, whole in torch_private.sharded_and_whole(cast(FSDPModule, unit)):
            if isinstance(whole, DTensor) and whole.requires_grad and Replicate() in whole.placements:
                if whole not in known:
                    known[whole] = _FollowedParameter(whole)
                known[whole].follow(shard)

    unit.register_forward_pre_hook(attach)


class _FollowedParameter:
    """One parameter of a unit of FSDP, of which each rank has a shard.

    FSDP adds up the local parts of gradients, so all that it adds up must lie alike. `axes`, of the whole parameter's mesh, are
    those over which the gradients since the last reduction lie partial; None before the first.
    """

    def __init__(self, whole: DTensor) -> None:
        self.placements = whole.placements
        self.shard: nn.Parameter | None = None
        self.added_to = False
        self.axes: tuple[int, ...] | None = None
        whole.register_hook(self.arrived)

    def follow(self, shard: nn.Parameter) -> None:
        if shard is not self.shard:
            self.shard = shard
            shard.register_hook(self.adds)
            shard.register_post_accumulate_grad_hook(self.reduced)

    def arrived(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of the whole parameter, as FSDP shall see it: what is partial by name, FSDP would sum."""
        if not _behind or not isinstance(gradient, DTensor):
            return gradient
        own = summed_axes(gradient.placements, self.placements)
        if self.axes is None:
            before = None if self.shard is None else self.shard.grad
            # One that was summed already, such as by clipping, is added to a sum.
            self.axes = own if not isinstance(before, DTensor) else self._partial(before)
        if not self.axes:
            return gradient
        if own == self.axes:
            local = gradient.to_local()
        else:  # the rank's share of the sum
            ranks = math.prod(gradient.device_mesh.size(axis) for axis in self.axes)
            local = gradient.redistribute(placements=self.placements).to_local() / ranks
        return _lies(gradient, local, self.placements)

    def adds(self, _: torch.Tensor) -> None:
        """Autograd itself is about to add to the gradient of the shard, such as the one of a penalty on parameters."""
        self.added_to = True

    def reduced(self, shard: torch.Tensor) -> None:
        """FSDP has added a reduced gradient to that of the shard; or autograd has added one that is whole."""
        axes, gradient, whole = self.axes, shard.grad, self.added_to
        self.added_to = False
        if not whole:
            self.axes = None
        if not axes or not isinstance(gradient, DTensor) or self._partial(gradient) == axes:
            return
        mesh, placements, local = gradient.device_mesh, list(gradient.placements), gradient.to_local()
        for axis in axes:
            placements[axis - len(self.placements)] = Partial()
            if whole:  # FSDP will add the rank's own part to the rank's share
                local = local / mesh.size(mesh.ndim + axis - len(self.placements))
        shard.grad = _lies(gradient, local, placements)

    def _partial(self, gradient: DTensor) -> tuple[int, ...]:
        """The axes of the whole parameter's mesh, the last ones of the shard's, over which the shard's gradient lies partial."""
        last = gradient.placements[-len(self.placements) :]
        return tuple(axis for axis, placement in enumerate(last) if placement.is_partial())


def _lies(like: DTensor, local: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
    """These local parts, of a tensor of this shape, placed so."""
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
