"""Tokens that lie whole on all ranks of tp: each rank takes a part of them, and the results are joined."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.mesh import cut

Tensor = torch.Tensor

LAYOUTS = ("split", "terms", "joined", "equal")
"""How tokens lie over tp. `split`: each rank has its own. In the others every rank has all of them, and takes a part.

`terms`: the output is a term of a sum over tp, and so is every gradient of the inputs. `joined`: the output is whole, and the
gradients of the inputs are terms. `equal`: outputs and gradients are whole.
"""


class Stream:
    """The part of whole tokens that this rank of a mesh of tp computes: [T, ...] is cut as `torch.chunk` cuts."""

    def __init__(self, mesh: DeviceMesh, layout: str) -> None:
        self.layout = layout
        self.groups = [g for g in mesh.get_all_groups() if g.size() > 1]
        self.ranks, self.index = 1, 0
        for group in self.groups:
            self.ranks *= group.size()
            self.index = self.index * group.size() + dist.get_rank(group)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor [T, ...]."""
        if self.layout == "equal" and whole.requires_grad:
            own: Tensor = _OwnRows.apply(whole, self)
            return own
        return whole.narrow(0, *self.place(whole.size(0)))

    def joined(self, part: Tensor, length: int) -> Tensor:
        """What the ranks computed of [length, ...], from this rank's rows."""
        if self.layout == "terms":
            start, own = self.place(length)
            before, after = (part.new_zeros(n, *part.shape[1:]) for n in (start, length - start - own))
            return torch.cat([before, part, after])
        whole: Tensor = _JoinedRows.apply(part, self, length)
        return whole

    def place(self, length: int) -> tuple[int, int]:
        """Where this rank's rows begin, and how many there are."""
        return cut(length, self.ranks, self.index)

    def gathered(self, part: Tensor, length: int) -> Tensor:
        """The rows of all ranks, [length, ...]."""
        longest = cut(length, self.ranks, 0)[1]
        whole = part.new_zeros(longest, *part.shape[1:])
        whole[: part.size(0)] = part
        for group in reversed(self.groups):
            every = whole.new_empty(group.size() * whole.size(0), *whole.shape[1:])
            dist.all_gather_into_tensor(every, whole, group=group)
            whole = every
        return whole[:length]


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, stream: Stream) -> Tensor:
        ctx.stream, ctx.length = stream, whole.size(0)
        return whole.narrow(0, *stream.place(whole.size(0))).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.stream.gathered(gradient, ctx.length), None


class _JoinedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, stream: Stream, length: int) -> Tensor:
        ctx.stream, ctx.length = stream, length
        return stream.gathered(part, length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.narrow(0, *ctx.stream.place(ctx.length)), None, None
