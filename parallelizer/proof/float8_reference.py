"""Linears in float8 on one process: the reference of a proof, written without torchao.

A scale is that of the tokens that one rank has in one microbatch. One process has all of them, so its tokens are grouped as
they lie on ranks, and each group has scales of its own. Products are made in the dtype of the run, of factors that were
rounded to float8.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import BATCH_AXES
from parallelizer.styles.application import Program
from parallelizer.styles.context_parallel.order import static_order
from parallelizer.styles.wrap_forward import wrap_forward

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 1e-12
"""What a largest value is raised to, as in torchao."""


UNPROVEN = (
    "prove the plan with the recipe rowwise-gw-hp, under which no tokens share a scale, or on a mesh of tp alone; scales are "
    "those of the tokens of a rank"
)


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


@dataclass(frozen=True)
class LowPrecision:
    """The modules that compute in float8 with their recipes, and the groups of tokens that share a scale.

    The rows are those of `data` ranks, each of which cuts its own into `microbatches` while it trains; of each row the
    tokens are those of `ranks` ranks, as `balance` deals out a sequence of `length`.
    """

    recipes: Mapping[str, str]
    data: int
    microbatches: int
    ranks: int
    balance: str
    length: int

    @property
    def blocks(self) -> int:
        """The equal blocks of rows: an evaluation is in one piece."""
        return self.data * (self.microbatches if torch.is_grad_enabled() else 1)


def low_precision(program: Program, length: int, pipeline: Pipeline | None) -> LowPrecision | None:
    """What a program computes in float8; None for nothing. `length` is that of a whole sequence."""
    recipes = {a.module: a.options.get("recipe", "tensorwise") for a in program.of_slot("precision")}
    if not recipes:
        return None
    microbatches = (pipeline.microbatches or 1) if pipeline is not None and program.stages is not None else 1
    mesh = program.mesh
    return LowPrecision(
        recipes, mesh.size(*BATCH_AXES), microbatches, mesh.sizes["cp"], program.plan.balance, length
    )


def round_linears(model: nn.Module, precision: LowPrecision) -> None:
    """From now on the named linears compute in float8."""
    for path, name in precision.recipes.items():
        wrap_forward(model.get_submodule(path), functools.partial(_around, RECIPES[name], precision))


def _around(
    recipe: Casts,
    precision: LowPrecision,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    (x,) = (*args, *kwargs.values())
    if recipe.scales_tokens_alone:
        # The groups of tokens make no difference then. At an expert nothing tells them.
        precision = dataclasses.replace(precision, data=1, microbatches=1, ranks=1)
    try:
        order = token_order(x.shape[:-1], precision)
    except ValueError as error:
        message = f"float8 cannot be proven here, since the tokens of ranks cannot be told apart: {error}"
        raise PlanError([Diagnostic("model-failed", message, None, UNPROVEN)]) from None
    if not x.numel():
        weight, bias = cast(nn.Linear, module).weight, cast(nn.Linear, module).bias
        return nn.functional.linear(x, weight, bias)
    tokens = x.reshape(-1, x.shape[-1])[order]
    groups = precision.blocks * precision.ranks
    out = _Product.apply(tokens.view(groups, -1, x.shape[-1]), module.weight, recipe).flatten(0, 1)
    y = out[order.argsort()].view(*x.shape[:-1], -1)
    return y if module.bias is None else y + module.bias


def token_order(shape: torch.Size, precision: LowPrecision) -> torch.Tensor:
    """The tokens of a tensor of these leading dims, in row-major order, such that each group's are neighbours: int64 [tokens].

    Raises ValueError if the tokens cannot be told apart.
    """
    number = torch.arange(shape.numel())
    if shape.numel() % precision.blocks:
        raise ValueError(f"{list(shape)} tokens do not divide into {precision.blocks} blocks")
    blocks = number.view(precision.blocks, -1)
    if precision.ranks == 1:
        return number
    if blocks.size(1) % precision.length:
        raise ValueError(f"{list(shape)} tokens are no sequences of {precision.length}")
    rows = blocks.view(precision.blocks, -1, precision.length)
    order = static_order(precision.balance, precision.ranks)
    padded = precision.length + -precision.length % (2 * precision.ranks)
    found = []
    for rank in range(precision.ranks):
        positions = order.positions(padded, rank)
        found.append(rows[..., positions[positions < precision.length]].flatten(1))
    if len({part.size(1) for part in found}) > 1:
        raise ValueError(f"a sequence of {precision.length} does not divide over {precision.ranks} ranks")
    return torch.stack(found, 1).flatten()


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
