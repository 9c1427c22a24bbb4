"""Fused dimensions: `gate|up` or `q|k|v` in one parameter, of which every rank needs its slice of each part.

The parameter is stored in rank-major order of its parts. An ordinary shard of the dimension then gives each
rank its slice of each part, and torch's tools see a plain `Shard`. `pack` and `unpack` are the permutation
and its inverse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Packing:
    """A dimension made of `parts` (sizes that add up to it), each split over `ranks`."""

    dim: int
    parts: tuple[int, ...]
    ranks: int

    def order(self) -> torch.Tensor:
        """Original positions in packed order, shape [sum(parts)]."""
        starts = [sum(self.parts[:i]) for i in range(len(self.parts))]
        pieces = []
        for rank in range(self.ranks):
            for start, size in zip(starts, self.parts, strict=True):
                share = size // self.ranks
                pieces.append(torch.arange(start + rank * share, start + (rank + 1) * share))
        return torch.cat(pieces)

    def pack(self, full: torch.Tensor) -> torch.Tensor:
        """The full tensor in packed order."""
        return full.index_select(self.dim, self.order().to(full.device))

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The full tensor in its original order."""
        return packed.index_select(self.dim, torch.argsort(self.order()).to(packed.device))


def pack(module: nn.Module, name: str, packing: Packing) -> None:
    """Put a fused parameter of the module into packed order."""
    param = getattr(module, name)
    packed = packing.pack(param.detach())
    module.register_parameter(name, nn.Parameter(packed, requires_grad=param.requires_grad))
