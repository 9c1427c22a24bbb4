"""Cross entropy of logits, whole or sharded over the vocabulary. Of sharded ones no rank ever holds a whole row.

The cross entropy is the vocabulary-parallel one of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053,
section 3): ranks exchange numbers of tokens, never of logits. For one token with logits z and the label t,

    loss = log(sum_v exp(z_v - m)) - (z_t - m),    m = max_v z_v,    d loss / d z_v = softmax(z)_v - [v = t]

where the maximum and both terms come from each rank's own columns, by one all-reduce for the maximum and one
for the two terms together. Backward sends nothing. Torch's `loss_parallel` does the same for any
`F.cross_entropy` on DTensors. It is a context in which backward must run too. It sends three all-reduces and
keeps a float32 softmax of the logits. It is used for other losses.

Logits in 16 bits are computed with in float32, some rows at a time: 8,192 tokens with 128,256 columns take 3.9 GiB in float32,
and torch's own cross entropy holds three tensors of this size. Only the logits themselves are kept for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from parallelizer import torch_private
from parallelizer.mesh import cut


def cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
    """The sum of the tokens' losses in nats, a plain scalar: float64 for float64 logits, else float32.

    `logits` [..., vocabulary] are a plain tensor or a DTensor of any placement. Logits that are sharded
    over the vocabulary, evenly or not, stay sharded. `labels` [...] are int64, with `ignore_index` for
    tokens without a loss; the sum is 0 if all are ignored. Collective over the axis that shards the
    vocabulary, whose ranks pass the same labels. Raises RuntimeError, or IndexError for plain logits, for a
    label that is not a column.
    """
    labels = labels.flatten()
    if isinstance(logits, DTensor):
        logits = _by_vocabulary(logits)
        axis = next((i for i, p in enumerate(logits.placements) if isinstance(p, Shard)), None)
        local = logits.to_local().flatten(0, -2)
        if axis is not None:
            mesh, columns = logits.device_mesh, logits.shape[-1]
            first = _first_column(local.shape[-1], columns, mesh.size(axis), mesh.get_local_rank(axis))
            total: Tensor = _VocabularyParallel.apply(
                local, labels, first, columns, ignore_index, mesh.get_group(axis)
            )
            return total
        logits = local
    whole: Tensor = _PlainLogits.apply(logits.flatten(0, -2), labels, ignore_index)
    return whole


def taken_sharded(output: Any) -> AbstractContextManager[None]:
    """Around a loss and its backward: `F.cross_entropy` takes a model's output that lies sharded over the vocabulary.

    Nothing for plain tensors. The output itself is not held.
    """
    return loss_parallel() if is_sharded(output) else nullcontext()


def is_sharded(output: Any) -> bool:
    """Whether a model's output has DTensors in it."""
    return any(isinstance(tensor, DTensor) for tensor in torch_private.tree_leaves(output))


def plain(value: Tensor) -> Tensor:
    """What a loss returned as a plain tensor: computed from DTensors it may be one itself. Collective then."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _by_vocabulary(logits: DTensor) -> DTensor:
    """The logits sharded over their last dimension on at most one axis, and whole on all others."""
    last = Shard(logits.ndim - 1)
    kept = next((i for i, p in enumerate(logits.placements) if p == last), None)
    return logits.redistribute(
        placements=[last if i == kept else Replicate() for i in range(len(logits.placements))]
    )


def _first_column(held: int, columns: int, ranks: int, rank: int) -> int:
    """The first column that a rank holds."""
    first, length = cut(columns, ranks, rank)
    if held != length:
        raise ValueError(
            f"rank {rank} of {ranks} holds {held} of {columns} columns, which is not DTensor's share"
        )
    return first


NO_COLUMN = "a label is no column of the logits"
"""The text of the error."""

PIECE = 2**26
"""Logits that are computed with in float32 at a time: 256 MiB."""

MOST_PIECES = 16
"""More logits than these pieces hold are cut into larger pieces, because each piece takes a dozen kernels."""


def _pieces(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of the logits, with those of other tensors whose first dimension counts tokens too."""
    pieces = max(1, min(MOST_PIECES, -(-logits.numel() // PIECE)))
    rows = max(1, -(-len(logits) // pieces))
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)


def _into(gradient: Tensor, softmax: Tensor, column: Tensor, here: Tensor, scale: Tensor) -> None:
    """The gradients of some rows, whose softmax is overwritten. `here` says which rows hold the label's column."""
    if softmax.shape[-1]:
        softmax.scatter_add_(-1, column[:, None], -here.to(softmax.dtype)[:, None])
    gradient.copy_(softmax.mul_(scale[:, None]))  # with `out=gradient`, a CPU would hold the product twice


def _terms(logits: Tensor, largest: Tensor, column: Tensor, here: Tensor) -> Tensor:
    """Of some rows, [2, rows]: the sum of the exponentials, and the label's own logit; both less the largest logit."""
    shifted = logits.to(largest.dtype, copy=True).sub_(largest[:, None])
    own = shifted.gather(-1, column[:, None])[:, 0]
    return torch.stack([shifted.exp_().sum(-1), own.where(here, 0)])


class _PlainLogits(torch.autograd.Function):
    """Logits [tokens, columns] of any floating dtype, labels [tokens] -> the sum of the losses."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.ignored = ignored
        losses = [
            F.nll_loss(
                F.log_softmax(some, -1, dtype=_wide(some)), theirs, ignore_index=ignored, reduction="sum"
            )
            for some, theirs in _pieces(logits, labels)
        ]
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The softmax again, from the logits, which are held anyhow."""
        logits, labels = ctx.saved_tensors
        counts = labels != ctx.ignored
        column, scale = labels.where(counts, 0), gradients[0].where(counts, 0)
        gradient = torch.empty_like(logits)
        for some, into, *rest in _pieces(logits, gradient, column, counts, scale):
            _into(into, F.softmax(some, -1, dtype=_wide(some)), *rest)
        return gradient, None, None


class _VocabularyParallel(torch.autograd.Function):
    """Local logits [tokens, local columns] of any floating dtype, labels [tokens] -> the sum of the losses."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        first: int,
        columns: int,
        ignored: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Two all-reduces, of [tokens] and [2, tokens]."""
        counts = labels != ignored
        torch_private.assert_all(~counts | ((labels >= 0) & (labels < columns)), NO_COLUMN)
        held, wide = logits.shape[-1], _wide(logits)
        largest = (logits.amax(-1) if held else logits.new_full(labels.shape, -torch.inf)).to(wide)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        here = (labels >= first) & (labels < first + held)
        column = (labels - first).clamp(0, max(0, held - 1))
        terms = largest.new_zeros(2, len(labels))
        if held:
            terms = torch.cat([_terms(*some) for some in _pieces(logits, largest, column, here)], 1)
        dist.all_reduce(terms, group=group)
        log_sum = terms[0].log()
        ctx.save_for_backward(logits, column, here, counts, largest + log_sum)
        return (log_sum - terms[1]).where(counts, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The softmax again, from the logits, which are held anyhow."""
        logits, column, here, counts, log_sum_exp = ctx.saved_tensors
        scale = gradients[0].where(counts, 0)
        gradient = torch.empty_like(logits)
        for some, into, total, *rest in _pieces(logits, gradient, log_sum_exp, column, here, scale):
            _into(into, some.to(_wide(some), copy=True).sub_(total[:, None]).exp_(), *rest)
        return gradient, None, None, None, None, None


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
