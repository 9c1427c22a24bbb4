"""fsdp: who shards which parameter on which dimension, decided while compiling; `fully_shard` does the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelizer.plan import REPLICATE, Placement, shard

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Assignment:
    """How one parameter is sharded over the folded data axis; `reason` says why it is not, where it is
    not.
    """

    placement: Placement
    reason: str | None = None


def units(model: nn.Module, options: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Which parameters each FSDP unit gathers, by the unit's path, innermost unit first.

    `options` are the fsdp options by module path. A module below its `min_params` is left to the next unit
    around it, unless there is none.
    """
    # Stable: modules of one depth stay in the model's order.
    paths = sorted((name for name, _ in model.named_modules() if name in options), key=_depth, reverse=True)
    owned: dict[str, list[str]] = {}
    taken: set[str] = set()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    for path in paths:
        inside = [n for n in sizes if n not in taken and (path == "" or n.startswith(path + "."))]
        if sum(sizes[n] for n in inside) < options[path].get("min_params", 0) and _enclosed(path, paths):
            continue
        owned[path] = inside
        taken.update(inside)
    return owned


def changes_precision_or_place(options: Mapping[str, Any], params: Sequence[nn.Parameter]) -> bool:
    """Whether a unit has something to do on a single data rank too."""
    dtype = DTYPES.get(options.get("param_dtype") or "")
    return bool(options.get("cpu_offload")) or (dtype is not None and any(p.dtype != dtype for p in params))


def assign(
    param: nn.Parameter, options: Mapping[str, Any], tensor: Mapping[str, Placement], ranks: int
) -> Assignment:
    """The dimension of one parameter that is sharded over `ranks`, after tensor parallelism has taken its
    part.
    """
    if param.numel() < options.get("min_size", 0):
        return Assignment(REPLICATE, "too small")
    if param.ndim == 0:
        return Assignment(REPLICATE, "a scalar")
    if options.get("shard_dim", "0") != "largest":
        return Assignment(shard(0))
    used = {p.dim for p in tensor.values() if p.dim is not None}
    free = [d for d in range(param.ndim) if d not in used]
    if not free:
        return Assignment(REPLICATE, "every dimension is sharded already")
    even = [d for d in free if param.shape[d] % ranks == 0]
    if not even:
        return Assignment(REPLICATE, f"no dimension left divides by {ranks}")
    return Assignment(shard(max(even, key=lambda d: (param.shape[d], -d))))


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _enclosed(path: str, paths: Sequence[str]) -> bool:
    return any(other != path and (other == "" or path.startswith(other + ".")) for other in paths)
