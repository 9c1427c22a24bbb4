"""Linears in float8 on one process: the reference of a proof, written without torchao.

Each group of tokens that a rank has in one microbatch (`float8_tokens`) has scales of its own. Products are made in the dtype
of the run, of factors that were rounded to float8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from parallelizer.proof.float8_tokens import LowPrecision, ScaleGroups
from parallelizer.styles.wrap_forward import wrap_forward

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 1e-12
"""What a largest value is raised to, as in torchao."""


@dataclass(frozen=True)
class Cast:
    """How a factor is rounded: its dtype, and whether each row has a scale of its own, or all of a group share one."""

    dtype: torch.dtype
    rowwise: bool


@dataclass(frozen=True)
class Casts:
    """The casts of the three products; the product that gives the weight's gradient may have none."""

    input: Cast
    weight: Cast
    gradient: Cast
    weight_for_input: Cast
    rounds_weight_gradient: bool = True
    powers_of_two: bool = True

    @property
    def scales_tokens_alone(self) -> bool:
        """Whether no two tokens share a scale."""
        return self.input.rowwise and self.gradient.rowwise and not self.rounds_weight_gradient


_ROW, _WHOLE = Cast(E4M3, True), Cast(E4M3, False)
RECIPES = {
    "tensorwise": Casts(_WHOLE, _WHOLE, Cast(E5M2, False), _WHOLE, powers_of_two=False),
    "rowwise": Casts(_ROW, _ROW, _ROW, _ROW),
    "rowwise-gw-hp": Casts(_ROW, _ROW, _ROW, _WHOLE, rounds_weight_gradient=False),
}


def round_linears(model: nn.Module, precision: LowPrecision) -> None:
    """From now on the named linears compute in float8. Stacked experts are for `float8_experts.round_experts`."""
    tokens = ScaleGroups(precision)
    tokens.follow(model)
    for path, name in precision.recipes.items():
        if path not in precision.experts:
            wrap_forward(model.get_submodule(path), functools.partial(_around, RECIPES[name], tokens))


def _around(
    recipe: Casts,
    tokens: ScaleGroups,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    (x,) = (*args, *kwargs.values())
    # At an expert nothing tells the groups of tokens, and if no tokens share a scale they make no difference.
    groups = (
        torch.arange(x.shape[:-1].numel())[None]
        if recipe.scales_tokens_alone
        else tokens.groups(x.shape[:-1])
    )
    if not x.numel():
        weight, bias = cast(nn.Linear, module).weight, cast(nn.Linear, module).bias
        return nn.functional.linear(x, weight, bias)
    order = groups.flatten()
    grouped = x.reshape(-1, x.shape[-1])[order].view(*groups.shape, -1)
    out = _Product.apply(grouped, module.weight, recipe).flatten(0, 1)
    y = out[order.argsort()].view(*x.shape[:-1], -1)
    return y if module.bias is None else y + module.bias


def round_product(x: torch.Tensor, weight: torch.Tensor, recipe: Casts) -> torch.Tensor:
    """x @ weight.T in float8, forward and backward: x [groups, tokens, inputs], weight [outputs, inputs]."""
    if not x.numel():
        return x @ weight.t()
    made: torch.Tensor = _Product.apply(x, weight, recipe)
    return made


class _Product(torch.autograd.Function):
    """x @ weight.T in float8: x [groups, tokens, inputs], weight [outputs, inputs]."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Casts) -> torch.Tensor:
        context.save_for_backward(x, weight)
        context.recipe = recipe
        round_to = functools.partial(rounded, powers_of_two=recipe.powers_of_two)
        return round_to(x, recipe.input, (-1,), (1, 2)) @ round_to(weight, recipe.weight, (1,), (0, 1)).t()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = context.saved_tensors
        recipe: Casts = context.recipe
        round_to = functools.partial(rounded, powers_of_two=recipe.powers_of_two)
        of_input = round_to(gradient, recipe.gradient, (-1,), (1, 2)) @ round_to(
            weight, recipe.weight_for_input, (0,), (0, 1)
        )
        if recipe.rounds_weight_gradient:
            gradient = round_to(gradient, recipe.gradient, (1,), (1, 2))
            x = round_to(x, recipe.input, (1,), (1, 2))
        return of_input, gradient.flatten(0, 1).t() @ x.flatten(0, 1), None


def rounded(
    tensor: torch.Tensor, cast: Cast, row: tuple[int, ...], whole: tuple[int, ...], *, powers_of_two: bool
) -> torch.Tensor:
    """The tensor with its values rounded to float8, in its own dtype. The dims `row`, or `whole`, share a scale."""
    largest = tensor.abs().amax(dim=row if cast.rowwise else whole, keepdim=True)
    top = torch.finfo(cast.dtype).max
    scale = (top / largest.to(torch.float64).clamp(min=SMALLEST)).to(torch.float32)
    if powers_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    bits = (tensor.to(torch.float32) * scale).clamp(-top, top).to(cast.dtype)
    return bits.to(tensor.dtype) / scale.to(tensor.dtype)
