"""The ring as an operator, for compiled code.

`torch.compile` does not trace point-to-point calls: it breaks the graph at each of them, and inside the mode that
intercepts attention the pieces are many and small. An operator is one node of the graph. Arguments of an operator are
tensors and plain values, so the process group is given by its name, and the order by its name and its numbers.

Outside compiled code the ring is `ring.RingAttention`, whose collectives and tensors the dry run sees one by one.
`OPERATORS` has the functions behind the operators, for recorders of a real step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallelizer import torch_private
from parallelizer.styles.context_parallel.kernels import accumulation_dtype
from parallelizer.styles.context_parallel.order import Contiguous, Dealt, Order
from parallelizer.styles.context_parallel.part import SequencePart
from parallelizer.styles.context_parallel.ring import Ring, ring_backward, ring_forward

Tensor = torch.Tensor

_HOW = "Tensor? mask, Tensor? dealt, str order, int ranks, int? length, str group, int[] places, bool is_causal, float scale"
"""How the ring runs, as both operators are told. `dealt` is of an order that is `Dealt`."""


def compiled_ring(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """As `RingAttention.apply`."""
    order, part = ring.order, ring.part
    dealt = order.dealt if isinstance(order, Dealt) else None
    out: Tensor = torch.ops.parallelizer.ring_forward(
        q, k, v, ring.mask, dealt, order.name, order.ranks, order.length, _name(part.group), list(part.places),
        ring.is_causal, ring.scale,
    )[0]  # fmt: skip
    return out


@torch.compiler.assume_constant_result
def _name(group: dist.ProcessGroup) -> str:
    return group.group_name


def _forward(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    out, lse = ring_forward(q, k, v, _ring(*how))
    return out.contiguous(), lse


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return ring_backward(grad_out, q, k, v, out, lse, _ring(*how))


def _ring(
    mask: Tensor | None,
    dealt: Tensor | None,
    name: str,
    ranks: int,
    length: int | None,
    group: str,
    places: Sequence[int],
    is_causal: bool,
    scale: float,
) -> Ring:
    order: Order
    if dealt is not None:
        order = Dealt(ranks, length, dealt, name)
    else:
        order = Contiguous(ranks, length) if name == Contiguous.name else Order(ranks, length)
    step = places[1] - places[0]
    part = SequencePart(torch_private.group_of(group), range(places[0], places[-1] + 1, step))
    return Ring(part, order, is_causal, scale, mask)


_operator_forward = torch.library.custom_op(
    "parallelizer::ring_forward",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor)",
)
_operator_backward = torch.library.custom_op(
    "parallelizer::ring_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_HOW}) -> (Tensor, Tensor, Tensor)",
)


@_operator_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return q.new_empty((*q.shape[:-1], v.size(-1))), lse


@_operator_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, dealt, *how = inputs
    ctx.save_for_backward(q, k, v, *output, mask, dealt)
    ctx.how = how


def _differentiate(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, mask, dealt = ctx.saved_tensors
    grads = torch.ops.parallelizer.ring_backward(grad_out, q, k, v, out, lse, mask, dealt, *ctx.how)
    return (*grads, None, None, *(None for _ in ctx.how))


_operator_forward.register_autograd(_differentiate, setup_context=_save)

OPERATORS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.parallelizer.ring_forward.default: _forward,
    torch.ops.parallelizer.ring_backward.default: _backward,
}
