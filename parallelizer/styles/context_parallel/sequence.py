"""Whole sequences to local rows and back, with gradients, over the context-parallel axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelizer.language.plan import Flow
from parallelizer.styles.context_parallel.order import Order, order_of, padded
from parallelizer.torch_private import tree_leaves

UNKNOWN = (
    "none of the tensors that reached the model's forward was returned by shard_batch, so the order of its "
    "sequence is not known"
)
PASS_DEVICE = "a copy does not store its order: pass `device` to shard_batch instead of moving its result"


class CurrentOrder:
    """The order in which the sequence that is now in a model was dealt out, for all in it that depends on it.

    It is the order of the batch entry that reaches the model's forward; in backward, where a checkpoint may run parts of
    the forward again, that of the forward which the gradients belong to.
    """

    def __init__(self, order: Order) -> None:
        self.order = self.usual = order
        self.needed = self.padded = False
        self.known = True
        """Whether there is no padding but what the order says. Under a causal mask it does not matter."""

    def follow(self, model: nn.Module, *, needed: bool, padded: bool) -> None:
        """From now on take the order from the model's inputs. `needed`: an input without one is refused; `padded`: one
        may have unknown padding.
        """
        self.needed, self.padded = needed, padded
        model.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._leave)

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        found = next((order for t in tensors if (order := order_of(t)) is not None), None)
        if found is None and self.needed:
            raise ValueError(f"{UNKNOWN}; {PASS_DEVICE}")
        self.order, self.known = found or self.usual, found is not None or not self.padded

    def _leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        order = self.order
        if order == self.usual:
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._return_to(order))

    def _return_to(self, order: Order) -> None:
        self.order = order


def relay(tensor: torch.Tensor, flow: Flow, group: dist.ProcessGroup, sequence: CurrentOrder) -> torch.Tensor:
    """Lay a tensor out as `flow` says: split a whole one where it wants a shard, gather a split one where it
    arrives as one. A whole one that does not divide is padded with zeros, and what is gathered is without them.
    """
    ranks = dist.get_world_size(group)
    if flow.wanted is not None and flow.wanted.dim is not None:
        # Rows of other ranks get a zero gradient here, and the sum over the data axes makes it whole.
        dim = flow.wanted.dim
        rows, parts = tensor.size(dim), 2 * ranks
        sequence.order = order = sequence.order.padded_for(rows, parts)
        return order.split(padded(tensor, dim, -(-rows // parts) * parts), dim, dist.get_rank(group))
    if flow.arrives is None or flow.arrives.dim is None:
        raise ValueError(f"`{flow}` neither splits nor gathers")
    gathered: torch.Tensor = GatherSequence.apply(tensor, flow.arrives.dim, group, sequence.order)
    return sequence.order.whole(gathered, flow.arrives.dim)


class GatherSequence(torch.autograd.Function):
    """All ranks' rows in their original order; in backward, the sum of all ranks' gradients of this rank's
    rows."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup, order: Order
    ) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.order = dim, group, order
        return gather_sequence(tensor, dim, group, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        ranks = dist.get_world_size(ctx.group)
        sent = torch.stack([ctx.order.split(gradient, ctx.dim, rank) for rank in range(ranks)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return received.sum(0), None, None, None


def gather_sequence(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup, order: Order) -> torch.Tensor:
    """The whole tensor, padding included, from every rank's rows along `dim`, in the original order. No gradient."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return tensor
    local = tensor.contiguous()
    parts = [torch.empty_like(local) for _ in range(ranks)]
    dist.all_gather(parts, local, group=group)
    return order.join(parts, dim)
