"""The plan's `buffers`: batch entries split by rank, and the model's positional buffers restricted to this
rank's rows.

A model buffer is replaced when the model's forward begins, because only then the sequence's length is known.
It stays replaced through backward, where a checkpoint may run parts of forward again. `restore_buffers`
restores the whole buffers; so does taking a state dict.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelizer.language.glob import parse_glob
from parallelizer.language.plan import AXES, Plan
from parallelizer.mesh import describe, rename_axes
from parallelizer.styles.context_parallel import document_mask
from parallelizer.styles.context_parallel.dealing import order_for
from parallelizer.styles.context_parallel.order import Order, order_of, padded, static_order, tagged
from parallelizer.styles.context_parallel.sequence import CurrentOrder, gather_sequence
from parallelizer.styles.context_parallel.to_device import to_device

WHOLE = frozenset({"attention_mask"})
"""Entries of a batch, [batch, sequence], that a model is given whole under context parallelism, if the plan does not split
them: what they say is of keys, of which attention sees all.
"""


Tensor = torch.Tensor


def unknown_names(batch: Mapping[str, Tensor], plan: Plan) -> str | None:
    """What is wrong if the batch has an unknown entry in place of one that the plan splits: under context parallelism it
    would stay whole beside those that are split, in another order, without a word.
    """
    lacking = [n for n, b in plan.batch.items() if b.dim is not None and b.make is None and n not in batch]
    strange = [n for n in batch if n not in plan.batch and n not in WHOLE]
    if not (lacking and strange):
        return None
    return (
        f"the plan splits {', '.join(lacking)}, which the batch lacks; it has {', '.join(strange)}, which "
        f"the plan's `buffers.batch` does not: give them the same names"
    )


_DEALT: set[int] = set()
"""The numbers of ranks that `shard_tokens` has split tokens over in this process."""


def was_dealt(ranks: int) -> bool:
    """Whether any batch was split over so many ranks of `cp` in this process."""
    return ranks in _DEALT


def shard_tokens(
    batch: Mapping[str, Tensor],
    plan: Plan,
    mesh: DeviceMesh | None,
    *,
    device: torch.device | str | None = None,
    axes: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """This context-parallel rank's tokens of a batch: the entries that the plan's `buffers.batch` lists,
    split along their dimension in the order that the plan's `balance` says; the rest as they are.

    `batch` holds this data rank's rows as whole sequences, the same on every rank of `cp`. An entry made by `positions` is
    the global position of each local token, int64 [batch, local sequence]. One made by `document-mask` is who sees whom in packed
    documents, bool [batch, 1, local sequence, sequence], whose elements are made when they are read (`document_mask`). Both are
    also made without context parallelism, and without a mesh. Where an entry has a `pad`, a length that does not divide is
    padded, and `unshard` leaves the padding out. With `device`, what is returned lies there; the tensors know how they were
    dealt out, and copies of them do not. `axes` renames the axes of a DeviceMesh that has names of its own, as in `rename_axes`.

    Raises ValueError when a sequence does not divide by twice the size of cp, no entry tells its length, or the batch
    has an entry that the plan does not know in place of one that it splits.
    """
    mesh = rename_axes(mesh, axes) if mesh is not None else None
    ranks, rank = _cp(mesh) if mesh is not None else (1, 0)
    split = {n: b for n, b in plan.batch.items() if b.dim is not None and b.make is None and n in batch}
    if ranks > 1 and (wrong := unknown_names(batch, plan)):
        raise ValueError(wrong)
    _DEALT.add(ranks)
    order, rows = order_for(batch, split, plan, ranks, describe(mesh).sizes["tp"] if mesh is not None else 1)
    local = dict(batch)
    for name, buffer in split.items():
        dim = buffer.dim or 0
        whole = batch[name]
        if order.length is not None:
            whole = padded(whole, dim, rows, buffer.pad)
        local[name] = order.split(whole, dim, rank)
    makes = {name: buffer.make for name, buffer in plan.batch.items() if buffer.make}
    if makes:
        if not split:
            named = ", ".join(name for name, buffer in plan.batch.items() if buffer.dim is not None)
            raise ValueError(f"positions cannot be made: none of the entries {named} is in the batch")
        first, buffer = next(iter(split.items()))
        positions = order.positions(rows, rank, batch[first].device)
        for name, make in makes.items():
            if make == "document-mask":
                documents = batch[_documents(plan, batch)]
                where = torch.device(device) if device is not None else documents.device
                made = document_mask.made(documents, positions, where)
                local[name] = document_mask.dense(made) if _compiles(plan) else made
            else:
                local[name] = positions.expand(batch[first].size(0), -1) if buffer.dim else positions
    if device is not None:
        local = {name: to_device(tensor, device) for name, tensor in local.items()}
    if ranks > 1:
        for name in (*split, *makes):
            tagged(local[name], order)
    return local


def _documents(plan: Plan, batch: Mapping[str, Tensor]) -> str:
    """The entry that numbers documents."""
    for name, buffer in plan.batch.items():
        if buffer.documents and name in batch:
            return name
    raise ValueError(
        "a document-mask cannot be made: no entry of the batch has `documents: true` in the plan"
    )


def _compiles(plan: Plan) -> bool:
    """Whether the plan compiles modules: their code reads a mask itself, and is the same for all documents."""
    return any(use.style == "compile" for rule in plan.rules for use in rule.uses)


def unshard(
    tensor: Tensor, mesh: DeviceMesh | dist.ProcessGroup, dim: int = 1, *, like: Tensor | None = None
) -> Tensor:
    """The whole tensor in its original order, from every cp rank's rows along `dim`, for example of
    evaluation output.

    `mesh` has our axis names, or is a DeviceMesh of one axis or a process group. `like` is an entry of the
    batch that `shard_batch` returned, which stores its order and its padding; without it, head-tail order
    is assumed. A DTensor, such as logits sharded over the vocabulary, is gathered first. Collective over
    `cp` and the axes of a DTensor; no gradient. Returns the tensor itself if nothing is split.
    """
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    group: dist.ProcessGroup
    if not isinstance(mesh, DeviceMesh):
        group = mesh
    elif mesh.ndim == 1 and tuple(mesh.mesh_dim_names or ()) not in {(axis,) for axis in AXES}:
        group = mesh.get_group()
    elif _cp(mesh)[0] == 1:
        return tensor
    else:
        group = mesh.get_group("cp")
    order = (order_of(like) if like is not None else None) or Order(dist.get_world_size(group))
    if order.ranks == 1:
        return tensor
    return order.whole(gather_sequence(tensor.detach(), dim, group, order), dim)


def _cp(mesh: DeviceMesh) -> tuple[int, int]:
    """Size of the cp axis and this rank's index on it. Raises ValueError for axes that have other names than
    ours.
    """
    ranks = describe(mesh).sizes["cp"]
    return ranks, mesh.get_local_rank("cp") if ranks > 1 else 0


@dataclass(frozen=True)
class _Part:
    """The rows of a buffer that a rank has in its place, the positions that they are of, and versions of both tensors."""

    whole: Tensor
    version: int
    positions: Tensor
    local: Tensor
    local_version: int

    def still(self, whole: Tensor, positions: Tensor) -> bool:
        """Whether it is the part of this buffer at these positions, and nobody wrote into either."""
        return (
            self.whole is whole
            and self.positions is positions
            and self.version == whole._version
            and self.local_version == self.local._version
        )


class LocalBuffers:
    """The whole positional buffers of one model, and the swapping of them; `sequence` says in which order. They are swapped
    when the forward of one of `forwards` begins: the model itself, or its stages, which have the same buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: DeviceMesh,
        sequence: CurrentOrder | None = None,
        forwards: Sequence[nn.Module] | None = None,
    ) -> None:
        self.model, self.plan = model, plan
        self.ranks, self.rank = _cp(mesh)
        self.signature = inspect.signature(model.forward)
        names = [n for n, _ in model.named_buffers()]
        self.dims = {n: b.dim or 0 for g, b in plan.buffers.items() for n in parse_glob(g).select(names)}
        self.whole: dict[str, Tensor] = {}
        self._parts: dict[str, _Part] = {}
        self._there: tuple[Order, int, Tensor] | None = None
        self.sequence = sequence or CurrentOrder(static_order(plan.balance, self.ranks))
        if self.dims and self.ranks > 1:
            model.register_state_dict_pre_hook(self._restore_before)
        padded = any(buffer.pad is not None for buffer in plan.batch.values())
        for begins in (model,) if forwards is None else forwards:
            if self.dims and self.ranks > 1:
                begins.register_forward_pre_hook(self._swap, prepend=True, with_kwargs=True)
            if self.ranks > 1:
                self.sequence.follow(begins, needed=_by_batch(plan), padded=padded)

    def _swap(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.restore()
        length = self._local_length(args, kwargs) * self.ranks
        order = self.sequence.order
        positions = self._positions(order, length)
        if positions.ndim > 1:
            raise ValueError(
                f"the model's buffers {', '.join(self.dims)} have one order for all rows of the batch, and "
                f"`balance: {order.name}` has one for each: give the model its positions in the batch"
            )
        real = length if order.length is None else order.length
        for name, dim in self.dims.items():
            path, _, leaf = name.rpartition(".")
            owner = self.model.get_submodule(path)
            whole = getattr(owner, leaf)
            if whole.size(dim) < real:  # on every rank, not only where the last positions are
                raise ValueError(
                    f"a sequence of {real} tokens: the buffer {name} has {whole.size(dim)} positions"
                )
            self.whole[name] = whole
            setattr(owner, leaf, self._local(name, whole, dim, positions))

    def _local(self, name: str, whole: Tensor, dim: int, positions: Tensor) -> Tensor:
        """This rank's part of a buffer: that of the forward before if nothing changed, as among microbatches."""
        tracked = not (torch.is_inference_mode_enabled() or whole.is_inference())
        if tracked and (known := self._parts.get(name)) is not None and known.still(whole, positions):
            return known.local
        # What padding reads does not matter: its positions may lie behind the end.
        local = whole.index_select(dim, positions.clamp(max=whole.size(dim) - 1).to(whole.device))
        if tracked:
            self._parts[name] = _Part(whole, whole._version, positions, local, local._version)
        return local

    def _positions(self, order: Order, length: int) -> Tensor:
        """The positions of this rank's tokens, on the model's device: those of the last step, if the order is the same."""
        if self._there is None or self._there[0] is not order or self._there[1] != length:
            device = next((b.device for n, b in self.model.named_buffers() if n in self.dims), None)
            self._there = order, length, order.positions(length, self.rank, device)
        return self._there[2]

    def _local_length(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        bound = self.signature.bind(*args, **kwargs).arguments
        for name, buffer in self.plan.batch.items():
            if isinstance(bound.get(name), Tensor) and buffer.dim is not None:
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


def _by_batch(plan: Plan) -> bool:
    """Whether only the batch itself can tell how it was dealt out."""
    return plan.balance in ("per-document", "by-cost") or (
        plan.balance == "auto" and any(buffer.documents for buffer in plan.batch.values())
    )
