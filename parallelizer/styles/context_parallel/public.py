"""Context parallelism in any training loop, without a plan.

    modules = [block.attention for block in model.blocks]
    context_parallel(modules, mesh["cp"], method="auto")
    local = shard_buffers({"tokens": tokens, "labels": labels}, {"tokens": 1, "labels": 1}, mesh["cp"])
    loss(model(local["tokens"]), local["labels"])          # a mean over tokens is a mean over ranks too
    logits = unshard(local_logits, mesh["cp"], dim=1)      # the whole logits, without gradient

Gradients of parameters are each rank's term of a sum: FSDP or an all-reduce over the axis sums them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.styles.context_parallel import balance
from parallelizer.styles.context_parallel.choice import METHODS
from parallelizer.styles.context_parallel.intercept import ContextOptions, unwrap, wrap

AXIS = "cp"
Where = dist.ProcessGroup | DeviceMesh


def context_parallel(
    modules: nn.Module | Iterable[nn.Module],
    where: Where,
    *,
    method: str = "auto",
    keep_gathered: bool = False,
    ulysses_degree: int | None = None,
) -> None:
    """Run the attention calls of these modules, at any depth, over the whole sequence, which is split over
    `where`.

    `where` is a process group, a DeviceMesh of one axis, or one with an axis `cp`. `method` is
    `all-gather`, `ring`, `ulysses`, `ulysses-ring` or `auto`; `context_attention` describes what each
    method sends and supports. Modules keep their signatures, parameters and state dicts; `intercept.unwrap`
    removes the change.

    There is no check of a loop of your own: attention in other modules sees only this rank's rows. Compare
    with one rank once, or use a plan, which `validate` and `verify` check.

    Raises ValueError, with every module unchanged, for an unknown method, a mesh of several axes without
    `cp`, an empty list of modules, or a module that is context-parallel already or is inside another one.
    While a module runs, raises ContextParallelError for a call that cannot be computed exactly.
    """
    if method not in (*METHODS, "auto"):
        raise ValueError(f"there is no method {method!r}; there are {', '.join(METHODS)} and auto")
    options = ContextOptions(keep_gathered=keep_gathered, method=method, ulysses_degree=ulysses_degree)
    group, done = group_of(where), list[nn.Module]()
    if ulysses_degree is not None and (ulysses_degree < 1 or dist.get_world_size(group) % ulysses_degree):
        raise ValueError(
            f"ulysses_degree={ulysses_degree} does not divide the {dist.get_world_size(group)} ranks"
        )
    if ulysses_degree is not None and method not in ("ulysses-ring", "auto"):
        raise ValueError(f"ulysses_degree is an option of ulysses-ring, and not of {method}")
    wanted = [modules] if isinstance(modules, nn.Module) else list(modules)
    if not wanted:
        raise ValueError("there are no modules to make context-parallel")
    try:
        for module in wanted:
            if not isinstance(module, nn.Module):
                raise ValueError(f"{module!r} is a {type(module).__name__}, not a torch.nn.Module")
            if any(module is inner for outer in done for inner in outer.modules()):
                raise ValueError(
                    f"one of the modules, {type(module).__name__}, is inside another; give one of the two"
                )
            wrap(module, group, options)
            done.append(module)
    except ValueError:
        for module in done:
            unwrap(module)
        raise


def shard_buffers(
    tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], where: Where
) -> dict[str, torch.Tensor]:
    """This rank's rows of each tensor along its dimension in `dims`, in the order that context parallelism
    expects (head-tail, `balance.split`). Tensors without an entry in `dims` are returned unchanged.
    Differentiable, no communication.

    Split every tensor that has a row for each token: ids, labels, positions, rotary tables, rows of a mask.
    Nothing is padded. Raises ValueError for a name or a dimension that does not exist, or a dimension that
    is not a multiple of twice the number of ranks.
    """
    missing = [name for name in dims if name not in tensors]
    if missing:
        raise ValueError(f"{', '.join(missing)} is not among {', '.join(tensors)}")
    for name, dim in dims.items():
        ndim = tensors[name].ndim
        if not isinstance(dim, int) or not -ndim <= dim < ndim:
            raise ValueError(f"{name} has {ndim} dimensions, and {dim!r} is none of them")
    group = group_of(where)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    return {n: balance.split(t, dims[n], ranks, rank) if n in dims else t for n, t in tensors.items()}


def group_of(where: Where) -> dist.ProcessGroup:
    """The process group of a mesh's only axis, or of its axis `cp`. Raises ValueError without one."""
    if not isinstance(where, DeviceMesh):
        return where
    if where.ndim > 1 and AXIS not in (where.mesh_dim_names or ()):
        raise ValueError(
            f"{where} has several axes and none called {AXIS}; pass the one to split over, mesh[...]"
        )
    return where.get_group(AXIS if where.ndim > 1 else None)
