"""What the host takes for DTensor, FSDP and autograd around collectives and operators, measured on two ranks.

On a GPU the host runs ahead of the device, so that its time is that of the calls alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parallelizer.styles.experts.travel import exchange
from parallelizer.torch_private import TorchDispatchMode, is_made_of_tensors

Tensor = torch.Tensor
Timed = Callable[[Callable[[], object], int], float]
"""Seconds of one call of a function that all ranks call so many times."""

RATES = ("dtensor", "redistribute", "exchange", "unit", "skew")


def wrapper_rates(device: str, timed: Timed) -> dict[str, float]:
    """Seconds of RATES: of dispatching an operator on DTensors; of moving a DTensor, of rows that travel, and of one of FSDP's
    collectives, each beyond the collective itself; and of waiting for a rank that comes late to a collective, because the others
    took less time for the computation before it.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    found = (
        _dispatching(mesh, device, timed),
        _redistributing(mesh, device, timed),
        _exchanging(mesh, device, timed),
        _unit(mesh, device, timed),
        _skew(device, timed),
    )
    return {name: max(0.0, seconds) for name, seconds in zip(RATES, found, strict=True)}


class _Dispatched(TorchDispatchMode):
    """Counts operators on DTensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_made_of_tensors, types)):
            self.count += 1
            return NotImplemented
        return func(*args, **(kwargs or {}))


def _dispatching(mesh: DeviceMesh, device: str, timed: Timed) -> float:
    """The mean over products, elementwise operators and views, forward and backward, of which autograd asks for many."""
    plain = torch.ones(4, 4, device=device)
    whole, weight = plain.repeat(mesh.size(), 1), torch.ones(4, 4, device=device)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    replicated = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
    weight.requires_grad_()

    def step(x: Any, w: Any) -> None:
        w.grad = None
        for _ in range(3):
            x = F.silu(F.linear(x, w)) * 1.5
            x = x.view(-1, 2, 4).transpose(1, 2).transpose(1, 2).reshape(-1, 4)
        (x.to_local() if isinstance(x, DTensor) else x).sum().backward()

    with _Dispatched() as seen:
        step(sharded, replicated)
    return (
        timed(lambda: step(sharded, replicated), 20) - timed(lambda: step(plain, weight), 20)
    ) / seen.count


def _redistributing(mesh: DeviceMesh, device: str, timed: Timed) -> float:
    """A tensor that is gathered in forward, whose gradient takes its part in backward: one collective of two."""
    part = torch.ones(4, 4, device=device)
    sharded = distribute_tensor(part.repeat(mesh.size(), 1), mesh, [Shard(0)])
    whole = sharded.to_local().new_ones(4 * mesh.size(), 4)
    gather = gather_function()
    moved = timed(lambda: sharded.redistribute(mesh, [Replicate()]), 40)
    return moved - timed(lambda: gather(whole, part), 40)


def _exchanging(mesh: DeviceMesh, device: str, timed: Timed) -> float:
    """Rows that travel there in forward and back in backward: two collectives."""
    ranks, group = mesh.size(), mesh.get_group()
    rows = torch.ones(4 * ranks, 4, device=device, requires_grad=True)
    sizes = [4] * ranks

    def travelled() -> None:
        rows.grad = None
        exchange(rows, sizes, sizes, group).sum().backward()

    def stayed() -> None:
        rows.grad = None
        (rows * 1.0).sum().backward()

    sent = rows.detach()
    raw = timed(lambda: dist.all_to_all_single(torch.empty_like(sent), sent), 40)
    return (timed(travelled, 40) - timed(stayed, 40)) / 2 - raw


def _unit(mesh: DeviceMesh, device: str, timed: Timed) -> float:
    units = 4
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False, device=device) for _ in range(units)))
    alone = nn.Sequential(*(nn.Linear(8, 8, bias=False, device=device) for _ in range(units)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch = torch.ones(4, 8, device=device)
    sharded = timed(lambda: model(batch).sum().backward(), 10)
    whole = timed(lambda: alone(batch).sum().backward(), 10)
    gathered, part = torch.ones(8 * mesh.size(), device=device), torch.ones(8, device=device)
    gather = gather_function()
    # A unit gathers twice and reduces once.
    return (sharded - whole) / (3 * units) - timed(lambda: gather(gathered, part), 20)


class _Summed(torch.autograd.Function):
    """An all-reduce in forward and one in backward, or copies instead of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: bool) -> Tensor:
        ctx.sums = sums
        return _Summed._sum(x, sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Summed._sum(grad, ctx.sums), None

    @staticmethod
    def _sum(x: Tensor, sums: bool) -> Tensor:
        x = x.clone()
        if sums:
            dist.all_reduce(x)
        return x


def _skew(device: str, timed: Timed) -> float:
    """By layers of a few milliseconds between all-reduces, less all-reduces that follow each other at once."""
    width, layers = 64, 8
    model = nn.ModuleList(
        nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        for _ in range(layers)
    ).to(device)
    batch = torch.ones(128, width, device=device)

    def step(sums: bool) -> None:
        x = batch
        for layer in model:
            x = x + _Summed.apply(layer(x), sums)
        x.sum().backward()

    raw = torch.ones(128 * width, device=device)
    between = (timed(lambda: step(True), 8) - timed(lambda: step(False), 8)) / (2 * layers)
    return between - timed(lambda: dist.all_reduce(raw), 32)


def gather_function() -> Callable[..., object]:
    """torch's all-gather into one tensor by its new name, where torch has it."""
    function: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function
