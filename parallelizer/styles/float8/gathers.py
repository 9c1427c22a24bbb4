"""FSDP's all-gathers in float8: each rank casts its shard of a weight, and the bytes travel.

A scale is that of the whole weight, so that the gathered weight is the one that the linear would have made itself. The ranks
that share a unit's weights agree on the largest values of all of them at once, before they gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from parallelizer.styles.float8.torchao_private import float8_of, gathered_float8, rescaled, weight_scales
from parallelizer.torch_private import extend_gathers

_measured: list[nn.Module] = []


def measured() -> nn.Module | None:
    """The FSDP unit whose weights' largest values are being found; None while there is none."""
    return _measured[-1] if _measured else None


@contextmanager
def _measuring(unit: nn.Module) -> Iterator[None]:
    _measured.append(unit)
    try:
        yield
    finally:
        _measured.pop()


def gather_in_float8(unit: nn.Module, names: Sequence[str]) -> None:
    """From now on FSDP gathers these weights of a unit, of linears in float8 with one scale for each tensor, in float8."""
    weights = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        weights.append((unit.get_submodule(path), leaf))
    scales = _Scales(unit, weights)
    extend_gathers(
        cast(FSDPModule, unit), {weight: _InFloat8(scales, index) for index, weight in enumerate(weights)}
    )


class _Scales:
    """The scales of a unit's weights, in the order in which FSDP asks for them."""

    def __init__(self, unit: nn.Module, weights: Sequence[tuple[nn.Module, str]]) -> None:
        self.unit, self.weights = unit, weights
        self.left: dict[int, torch.Tensor] = {}

    def of(self, index: int) -> torch.Tensor:
        """The scale of a weight: float32, of no dims. All of the unit's are made when the first is asked for. Collective."""
        if index not in self.left:
            self.left = dict(enumerate(self._made()))
        return self.left.pop(index)

    def _made(self) -> list[torch.Tensor]:
        params = [module.get_parameter(leaf) for module, leaf in self.weights]
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in params]
        largest = torch.stack([s.abs().max() if s.numel() else s.new_zeros(()) for s in shards])
        with _measuring(self.unit):
            for group in _groups(params):
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return weight_scales(largest)


def _groups(params: Sequence[nn.Parameter]) -> list[dist.ProcessGroup]:
    """The groups of ranks over which any of the parameters is sharded."""
    found: dict[int, Any] = {}
    for param in params:
        if isinstance(param, DTensor):
            for dim, placement in enumerate(param.placements):
                if placement.is_shard() and param.device_mesh.size(dim) > 1:
                    found.setdefault(dim, param.device_mesh.get_group(dim))
    return list(found.values())


class _InFloat8:
    """What FSDP gathers of one weight: its values in float8, as bytes, since gloo knows no float8."""

    def __init__(self, scales: _Scales, index: int) -> None:
        self.scales, self.index = scales, index

    def before(self, part: torch.Tensor, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        scale = self.scales.of(self.index)
        ranks = mesh.size(mesh.ndim - 1)
        rows = -(-size[0] // ranks) if part.shape[1:] == size[1:] else part.size(0)
        data = float8_of(part, scale, module).view(torch.uint8)
        if part.size(0) < rows:
            data = torch.cat([data, data.new_zeros(rows - part.size(0), *part.shape[1:])])
        return (data,), (scale, module)

    def after(self, gathered: Any, known: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        (data,), (scale, module) = gathered, known
        if out is not None:
            rescaled(out, scale)
            return None
        return gathered_float8(data, scale, dtype, module), (data,)
