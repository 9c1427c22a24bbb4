"""Products of groups of rows in float8: each expert's weights with the rows that chose it.

An expert is multiplied as a linear of its own is by torchao: each product casts both of its factors, with a scale for each row
of a factor. The scales of the product that gives the gradient of an expert's weights are those of all rows of the expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallelizer.styles.float8.recipes import DIVISOR
from parallelizer.styles.float8.torchao_private import row_scales, scaled_to_float8
from parallelizer.torch_private import has_values, largest_of_ranks, scaled_grouped_mm

Tensor = torch.Tensor


@dataclass(frozen=True)
class GroupedRecipe:
    """How groups are multiplied. `round_weight_gradient`: the product that gives the gradient of weights is in float8 too, and
    the weight in the gradient of the input has a scale for each row, where it otherwise has one for each expert. `emulate`:
    products of rounded factors are made in float32, or float64 for factors that were float64.

    Other ranks have other parts of the features that are summed (`summed`) and that are made (`made`): the largest values
    of a row are those on all of these ranks.
    """

    round_weight_gradient: bool
    emulate: bool
    summed: Sequence[dist.ProcessGroup] = ()
    made: Sequence[dist.ProcessGroup] = ()


class GroupedProduct(torch.autograd.Function):
    """rows [S, K] of groups that end at `ends` [G], int32, times weights [G, K, N], in float8: [S, N]. Rows behind the last group
    have no results. Collective where features lie on several ranks.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor, recipe: GroupedRecipe) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        ctx.recipe = recipe
        largest = [largest_along(rows, -1), largest_along(weights, 1)]
        of_rows, of_weights = agreed(largest, recipe.summed)
        return multiply_groups(
            Scaled.of(rows, of_rows), Scaled.of(weights, of_weights), ends, recipe.emulate, fast=True
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weights, ends = ctx.saved_tensors
        recipe: GroupedRecipe = ctx.recipe
        of_rows = of_weights = None
        if ctx.needs_input_grad[0]:
            transposed = weights.transpose(1, 2)
            of_columns = largest_along(transposed, 1)
            if not recipe.round_weight_gradient:
                of_columns = largest_along(of_columns, 2)
            of_gradient, of_columns = agreed([largest_along(gradient, -1), of_columns], recipe.made)
            if not recipe.round_weight_gradient:
                (of_columns,) = agreed([of_columns], recipe.summed)
            low = Scaled.of(transposed, of_columns)
            of_rows = multiply_groups(Scaled.of(gradient, of_gradient), low, ends, recipe.emulate, fast=False)
        if ctx.needs_input_grad[1]:
            made = (
                depth_product(gradient, rows, ends, recipe.emulate)
                if recipe.round_weight_gradient
                else sum_products(gradient, rows, ends)
            )
            of_weights = made.transpose(1, 2).to(weights.dtype)
        return of_rows, of_weights, None, None


def largest_along(tensor: Tensor, dim: int) -> Tensor:
    """The largest absolute values along a dim, which stays."""
    return tensor.abs().amax(dim=dim, keepdim=True)


def agreed(largest: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> list[Tensor]:
    """The largest values on all ranks of these groups, of each tensor: one all-reduce for each group."""
    if not groups:
        return list(largest)
    flat = torch.cat([t.flatten() for t in largest])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    for group in groups:
        flat = largest_of_ranks(flat, group)
    parts = flat.split([t.numel() for t in largest])
    return [part.view(t.shape) for part, t in zip(parts, largest, strict=True)]


@dataclass(frozen=True)
class Scaled:
    """The values of a tensor in float8, and its scales, with which its shape broadcasts. `dtype` is the tensor's own."""

    data: Tensor
    scale: Tensor
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor, largest: Tensor) -> Scaled:
        """The tensor in float8, by its largest values."""
        scale = row_scales(largest)
        return Scaled(scaled_to_float8(tensor, scale), scale, tensor.dtype)

    def rounded(self) -> Tensor:
        """The values that float8 has, in float32, or in float64 for a tensor that was float64."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.data.to(wide) / self.scale.to(wide)


def multiply_groups(rows: Scaled, weights: Scaled, ends: Tensor, emulate: bool, *, fast: bool) -> Tensor:
    """rows [S, K] times weights [G, K, N]: [S, N], in the rows' own dtype."""
    if emulate:
        return plain_groups(rows.rounded(), weights.rounded(), ends).to(rows.dtype)
    places, padded_ends, length = padding(ends, rows.data.size(0))
    scales = weights.scale.expand(-1, 1, weights.data.size(2)).reciprocal().squeeze(1).contiguous()
    made = scaled_grouped_mm(
        spread_out(rows.data, places, length),
        column_major(weights.data),
        rows.scale.new_ones(length).index_copy_(0, places, rows.scale.reciprocal().flatten()),
        scales,
        padded_ends,
        fast=fast,
    )
    return made.index_select(0, places).to(rows.dtype)


def depth_product(gradient: Tensor, rows: Tensor, ends: Tensor, emulate: bool) -> Tensor:
    """The sums over each group's rows of gradient [S, N] times rows [S, K]: [G, N, K], in float8. A feature of a group has a
    scale of its own.
    """
    left, right = (by_group(t, ends) for t in (gradient, rows))
    if emulate:
        return sum_products(left[0].rounded(), right[0].rounded(), ends)
    places, padded_ends, length = padding(ends, rows.size(0))
    factors = [spread_out(low.data, places, length).t().contiguous() for low, _ in (left, right)]
    scales = [of_groups.reciprocal().flatten() for _, of_groups in (left, right)]
    return scaled_grouped_mm(factors[0], factors[1].t(), scales[0], scales[1], padded_ends, fast=False)


def by_group(tensor: Tensor, ends: Tensor) -> tuple[Scaled, Tensor]:
    """A tensor [S, N] in float8 with scales [S, N] that the rows of a group share, and these by group: [G, N]."""
    groups = ends.numel()
    group = group_of_rows(ends, tensor.size(0))
    # One more group, of the rows behind the last.
    largest = tensor.new_zeros(groups + 1, tensor.size(1))
    largest.scatter_reduce_(0, group.unsqueeze(1).expand_as(tensor), tensor.abs(), "amax")
    scales = row_scales(largest)
    of_rows = scales.index_select(0, group)
    return Scaled(scaled_to_float8(tensor, of_rows), of_rows, tensor.dtype), scales[:groups]


def group_of_rows(ends: Tensor, rows: int) -> Tensor:
    """The number of the group of each row, int64 [rows]; that of rows behind the last group is the number of groups."""
    numbers = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, numbers, right=True)


def padding(ends: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
    """Where each row lies once every group is filled up to a multiple of 16 rows [rows], where the groups end then [G], int32,
    and how many rows that may be. The host reads nothing.
    """
    sizes = torch.cat([ends[:1], ends.diff()])
    wide = (sizes + DIVISOR - 1) // DIVISOR * DIVISOR
    padded_ends = wide.cumsum(0, dtype=torch.int32)
    before = padded_ends - wide - (ends - sizes)
    shift = torch.cat([before, padded_ends[-1:] - ends[-1:]])
    places = torch.arange(rows, device=ends.device) + shift.index_select(0, group_of_rows(ends, rows))
    length = -(-(rows + (DIVISOR - 1) * ends.numel()) // DIVISOR) * DIVISOR
    return places, padded_ends, length


def spread_out(data: Tensor, places: Tensor, length: int) -> Tensor:
    """Rows of float8 at these places of so many rows; zeros between them."""
    filled = data.new_zeros(length, data.size(1), dtype=torch.uint8)
    return filled.index_copy_(0, places, data.contiguous().view(torch.uint8)).view(data.dtype)


def column_major(matrices: Tensor) -> Tensor:
    """The same values with neighbours along the last dim but one, which is how kernels take the second factor."""
    return matrices.transpose(-2, -1).contiguous().transpose(-2, -1)


def plain_groups(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [S, K] times weights [G, K, N] of their groups: [S, N]."""
    if weights.size(0) == 1:
        return rows @ weights[0]
    if rows.dtype != torch.float64 or not has_values(rows):
        return F.grouped_mm(rows, weights, offs=ends)
    stops = ends.tolist()  # in a proof: kernels have no float64
    parts = [
        rows[begin:end] @ weight for begin, end, weight in zip([0, *stops], stops, weights, strict=False)
    ]
    return torch.cat([*parts, rows.new_zeros(len(rows) - stops[-1], weights.size(2))])


def sum_products(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """The sums over each group's rows of gradient [S, N] times rows [S, K], in their own dtype: [G, N, K]."""
    if ends.numel() == 1:
        return (gradient.t() @ rows).unsqueeze(0)
    if rows.dtype != torch.float64 or not has_values(rows):
        return F.grouped_mm(gradient.t(), rows, offs=ends)
    stops = ends.tolist()
    return torch.stack(
        [gradient[begin:end].t() @ rows[begin:end] for begin, end in zip([0, *stops], stops, strict=False)]
    )
