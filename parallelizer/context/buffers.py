"""The plan's `buffers`: batch entries split by rank, and the model's positional buffers seen as this rank's
rows.

A model buffer is swapped when the model's forward begins, because only then the sequence's length is known,
and stays so through backward, where a checkpoint may run parts of forward again. `restore_buffers` puts the
whole ones back; so does taking a state dict.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.context import balance
from parallelizer.context.sequence import gather_sequence
from parallelizer.glob import parse_glob
from parallelizer.mesh import describe
from parallelizer.plan import Plan


def shard_batch(batch: Mapping[str, torch.Tensor], plan: Plan, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """This context-parallel rank's tokens of a batch: the entries that the plan's `buffers.batch` lists,
    split along their dimension in the balanced order; the rest as they are.

    `batch` holds whole sequences, the same on every rank of `cp`. An entry made by `positions` is the global
    position of each local token, int64 [batch, local sequence], also without context parallelism. Raises
    ValueError when a sequence does not divide by twice the size of cp, or no entry tells its length.
    """
    ranks, rank = _cp(mesh)
    local = dict(batch)
    for name, buffer in plan.batch.items():
        if buffer.make is None and name in batch and buffer.dim is not None:
            local[name] = balance.split(batch[name], buffer.dim, ranks, rank)
    makes = [name for name, buffer in plan.batch.items() if buffer.make == "positions"]
    if makes:
        split = {name: buffer.dim for name, buffer in plan.batch.items() if buffer.dim is not None}
        first = next((name for name in split if name in batch), None)
        if first is None:
            raise ValueError(
                f"positions cannot be made: none of the entries {', '.join(split)} is in the batch"
            )
        dim, whole = split[first], batch[first]
        positions = balance.local_positions(whole.size(dim), ranks, rank).to(whole.device)
        for name in makes:
            local[name] = positions.expand(whole.size(0), -1) if dim else positions
    return local


def unshard(tensor: torch.Tensor, mesh: DeviceMesh, dim: int = 1) -> torch.Tensor:
    """The whole tensor in its original order from every cp rank's rows along `dim`, as for evaluation output.

    Collective over `cp`; no gradient. The tensor itself without context parallelism.
    """
    if mesh.ndim == 1 and mesh.mesh_dim_names is None:
        return gather_sequence(tensor.detach(), dim, mesh.get_group())
    if _cp(mesh)[0] == 1:
        return tensor
    return gather_sequence(tensor.detach(), dim, mesh.get_group("cp"))


def _cp(mesh: DeviceMesh) -> tuple[int, int]:
    """Size of the cp axis and this rank's index on it. Raises ValueError for axes that have other names than
    ours.
    """
    ranks = describe(mesh).sizes["cp"]
    return ranks, mesh.get_local_rank("cp") if ranks > 1 else 0


class LocalBuffers:
    """The whole positional buffers of one model, and the swapping of them."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
        self.model, self.plan = model, plan
        self.ranks, self.rank = _cp(mesh)
        self.signature = inspect.signature(model.forward)
        names = [n for n, _ in model.named_buffers()]
        self.dims = {n: b.dim or 0 for g, b in plan.buffers.items() for n in parse_glob(g).select(names)}
        self.whole: dict[str, torch.Tensor] = {}
        if self.dims and self.ranks > 1:
            model.register_forward_pre_hook(self._swap, prepend=True, with_kwargs=True)
            model.register_state_dict_pre_hook(self._restore_before)

    def _swap(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.restore()
        length = self._local_length(args, kwargs) * self.ranks
        order = balance.local_positions(length, self.ranks, self.rank)
        for name, dim in self.dims.items():
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            whole = getattr(owner, leaf)
            if whole.size(dim) < length:  # on every rank, not only where the last positions are
                raise ValueError(
                    f"a sequence of {length} tokens: the buffer {name} has {whole.size(dim)} positions"
                )
            self.whole[name] = whole
            setattr(owner, leaf, whole.index_select(dim, order.to(whole.device)))

    def _local_length(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        bound = self.signature.bind(*args, **kwargs).arguments
        for name, buffer in self.plan.batch.items():
            if isinstance(bound.get(name), torch.Tensor) and buffer.dim is not None:
                size: int = bound[name].size(buffer.dim)
                return size
        raise RuntimeError(
            f"none of the batch entries {', '.join(self.plan.batch)} reached the model's forward, so that the local "
            "length of the sequence is unknown"
        )

    def _restore_before(self, *_: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the whole buffers back; nothing happens when they are in place."""
        for name, whole in self.whole.items():
            path, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(path), leaf, whole)
        self.whole.clear()
