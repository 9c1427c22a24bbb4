"""The loss of a global batch for a user's own loop; `train_step` includes it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallelizer.runtime.state import ParallelState, state_of
from parallelizer.styles.context_parallel.buffers import was_dealt
from parallelizer.styles.sharded_logits import plain


def mean_loss(total: Tensor, weight: Tensor | float, model: nn.Module) -> Tensor:
    """The mean loss over the tokens of all ranks: a scalar that is the same on every rank, ready for
    `backward()`.

    `total` is the sum of this rank's losses, as `cross_entropy` returns it, and `weight` is their number. A
    mean of the ranks' means would differ if ranks have unequal numbers of labels. FSDP of a parallel model
    sums gradients instead of averaging them, so one division by the total weight is right for every mesh.
    If gradients are accumulated over n parts of equal weight, divide by n.

    `model` is the parallel model, or a framework's wrapper around it. Collective over the axes whose ranks
    have different tokens: one all-reduce of two numbers. Raises ValueError in a world of several ranks for
    a model without a plan. Warns if the mesh has `cp` and this process has split no batch over it.
    """
    total = plain(total)
    wide = torch.float64 if total.dtype == torch.float64 else torch.float32
    weights = torch.as_tensor(weight, dtype=wide, device=total.device)
    state = _state_inside(model)
    if state is not None:
        _warn_of_whole_batches(state.program.mesh.sizes["cp"])
    mean: Tensor = _Mean.apply(total.to(wide), weights, () if state is None else state.data_groups)
    return mean


def _warn_of_whole_batches(cp: int) -> None:
    """A model takes whole sequences for a rank's part of longer ones, and trains on another loss."""
    if cp > 1 and not was_dealt(cp):
        warnings.warn(
            f"the mesh has cp={cp}, and no batch was split over it: call parallelizer.shard_batch(batch, plan, mesh) before the "
            "model, or the sequences count as parts of longer ones and the loss is wrong",
            stacklevel=3,
        )


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        sums = torch.stack([total, weight])
        for group in groups:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(sums[1])
        return sums[0] / sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Each rank's part of the gradient; the sum of the parameters' gradients over the ranks adds the parts up."""
        (weight,) = ctx.saved_tensors
        return gradients[0] / weight, None, None


def _state_inside(model: nn.Module) -> ParallelState | None:
    """The state of a parallel model, also of one inside a wrapper; None for a lone process."""
    found = next((state for module in model.modules() if (state := state_of(module)) is not None), None)
    if found is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"{type(model).__name__} was not made parallel by a plan, and there are {dist.get_world_size()} ranks: which of "
            "them see different tokens is not known; call parallelizer.parallelize first"
        )
    return found
