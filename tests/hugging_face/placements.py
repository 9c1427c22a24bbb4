"""Where transformers' own tensor parallelism puts every parameter, element by element, beside where a program of ours does."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelizer.language.plan import full_name
from parallelizer.simulate.fake_world import enter_fake_world
from parallelizer.styles.application import Program, tensor_placements
from parallelizer.styles.packing import Packing
from parallelizer.styles.tied_parameters import parameter_names, tied_names

TP = 2

Piece = tuple[int, tuple[int, ...]] | None
"""The dimension that is split and this rank's positions in it; None for a parameter that lies whole."""


def ours(program: Program, model: nn.Module, rank: int, axis: str = "tp") -> dict[str, Piece]:
    """Each parameter's piece on a rank of an axis, as the program places and packs it."""
    placed = tensor_placements(program.applications)
    packed = {full_name(a.module, n): p for a in program for n, p in a.packed.items()}
    found: dict[str, Piece] = {}
    for name, param in parameter_names(model).items():
        dim = placed[name][axis].dim if axis in placed.get(name, {}) else None
        if dim is None:
            found[name] = None
            continue
        size = param.shape[dim]
        found[name] = dim, _positions(size, packed.get(name), rank)
    return found


@lru_cache
def _positions(size: int, packing: Packing | None, rank: int) -> tuple[int, ...]:
    order = torch.arange(size) if packing is None else packing.order()
    return tuple(order.chunk(TP)[rank].tolist())


def theirs(model: nn.Module, rank: int) -> dict[str, Piece]:
    """Each parameter's piece on a rank of tp, as transformers makes the model parallel. Uses this process up."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    return _placed(
        model,
        rank,
        lambda one, mesh: apply_tensor_parallelism(one, mesh, one._expand_parallel_plan(one.tp_plan)),
    )


def theirs_of_experts(model: nn.Module, rank: int) -> dict[str, Piece]:
    """As `theirs`, on a rank of two that share experts out. Uses this process up."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    def share_out(one: Any, mesh: Any) -> None:
        alone = init_device_mesh("cpu", (TP, 1), mesh_dim_names=("rest", "tp"))["tp"]
        apply_expert_parallelism(one, mesh, alone, one._expand_parallel_plan(one.ep_plan), "all_to_all")

    return _placed(model, rank, share_out)


def _placed(model: nn.Module, rank: int, apply: Callable[[Any, Any], Any]) -> dict[str, Piece]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    if not dist.is_initialized():
        enter_fake_world(TP, rank)
    mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
    one: Any = model
    names = list(parameter_names(model))
    for _, *others in tied_names(
        model
    ):  # transformers ties them after it has loaded what is parallel already
        for name in others:
            path, _, leaf = name.rpartition(".")
            alone = nn.Parameter(torch.empty_like(one.get_parameter(name)))
            one.get_submodule(path).register_parameter(leaf, alone)
    apply(one, mesh)

    @lru_cache
    def positions(size: int, placement: Any) -> tuple[int, ...]:
        alike = _on_first(placement)
        from torch.distributed.tensor import distribute_tensor

        local = distribute_tensor(torch.arange(size), mesh, [alike], src_data_rank=None).to_local()
        return tuple(local.tolist())

    found: dict[str, Piece] = {}
    for name in names:
        param = one.get_parameter(name)
        placement = param.placements[0] if isinstance(param, DTensor) else None
        if placement is None or placement.is_replicate():
            found[name] = None
        else:
            dim = placement.dim % param.ndim
            found[name] = dim, positions(param.shape[dim], placement)
    return found


def _on_first(placement: Any) -> Any:
    """The placement on dimension 0 instead of its own."""
    from torch.distributed.tensor import Shard

    if hasattr(placement, "split_factor"):
        return type(placement)(0, split_factor=placement.split_factor)
    return Shard(0)
