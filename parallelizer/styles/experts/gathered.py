"""Dispatch `all-gather`: every rank of the group sees all tokens, computes those of its experts, and sums of results go back.

For few experts and small batches: what travels does not depend on the routing, and is the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallelizer import torch_private
from parallelizer.language.routing import Routing
from parallelizer.styles.experts.counts import gathered_counts

Tensor = torch.Tensor


def gathered(
    tokens: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: int,
    group: dist.ProcessGroup,
    routing: Routing,
    path: str,
    call: int,
    computed: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """The weighted sum of its experts' results for each token: tokens [T, D], ids and weights [T, k]; [T, Dout]. T may differ
    between the ranks: shorter ones are filled up with tokens that have no expert. One host read, of the counts.
    """
    length, copies, own = tokens.size(0), ids.size(1), experts // group.size()
    longest, total = gathered_counts(ids.reshape(-1), experts, group, routing, path, call)
    more = longest // copies - length
    every = _GatheredRows.apply(F.pad(tokens, (0, 0, 0, more)), group)
    shares = _GatheredRows.apply(F.pad(weights, (0, 0, 0, more)), group).reshape(-1)
    numbers = _all_of(F.pad(ids, (0, 0, 0, more), value=experts), group).reshape(-1)
    numbers = numbers - dist.get_rank(group) * own
    numbers = torch.where((numbers >= 0) & (numbers < own), numbers, own)
    mine = numbers.argsort(stable=True)[:total]  # the others lie behind
    token = mine // copies
    if total:
        rows, numbers, shares = every[token], numbers[mine], shares[mine]
    else:
        # The module runs all the same, and all collectives of backward: on one row without weight.
        rows, numbers, shares = every[:1] * 0, numbers.new_zeros(1), shares[:1] * 0
    results = computed(rows, numbers, shares).narrow(0, 0, total)
    summed = results.new_zeros(every.size(0), results.size(1)).index_add(0, token, results)
    back: Tensor = _SummedRows.apply(summed, group)
    return back.narrow(0, 0, length)


def _all_of(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, [ranks * n, ...]."""
    every = tensor.new_empty(group.size() * tensor.size(0), *tensor.shape[1:])
    dist.all_gather_into_tensor(every, tensor.contiguous(), group=group)
    return every


def _own_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum over all ranks, [n / ranks, ...]."""
    return torch_private.own_sum(tensor.contiguous(), group)


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_of(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _own_sum(gradient, ctx.group), None


class _SummedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_sum(terms, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_of(gradient, ctx.group), None
