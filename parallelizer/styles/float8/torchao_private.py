"""Everything that is used of torchao. Names that torchao does not document have their reason beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from parallelizer.torch_private import local_tensor

if TYPE_CHECKING:
    from torch import nn


def linear_config(recipe: str, emulate: bool, pad: bool = False) -> Any:
    """The Float8LinearConfig of a recipe, by torchao's name. With `pad` the dimension that a product sums over is filled up to
    a multiple of 16.
    """
    from torchao.float8 import Float8LinearConfig

    return dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=pad
    )


def converted(linear: nn.Module, config: Any) -> nn.Module:
    """A Float8Linear with the parameters of a linear."""
    from torchao.float8 import convert_to_float8_training

    module: nn.Module = convert_to_float8_training(linear, config=config)
    return module


def float8_forward(linear: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """The forward of a Float8Linear, on a linear that has its configuration."""
    from torchao.float8.float8_linear import Float8Linear

    out: torch.Tensor = Float8Linear.forward(linear, input)
    return out


@contextmanager
def products_in_float64() -> Iterator[None]:
    """Emulated products of what was float64 are summed in float64 meanwhile, where torchao sums them in float32.

    With sums in float32 another order of summation, as ranks have it, would round a few values behind it to the
    neighbouring float8. A proof must not see that. It replaces the handler of one operator, for which torchao has no
    setting.
    """
    from torchao.float8 import float8_ops

    table, operator = float8_ops.FLOAT8_OPS_TABLE, torch.ops.aten.mm.default
    before = table[operator]

    def multiply(operator: Any, args: Any, kwargs: Any = None) -> torch.Tensor:
        a, b = args
        if a._orig_dtype != torch.float64 or not a._linear_mm_config.output.emulate:
            result: torch.Tensor = before(operator, args, kwargs)
            return result
        return torch.mm(*(t._data.double() / t._scale.double() for t in (a, b)))

    table[operator] = multiply
    try:
        yield
    finally:
        table[operator] = before


def weight_scales(largest: torch.Tensor) -> list[torch.Tensor]:
    """The scales of weights by their largest values, [weights]: a tensor of no dims in float32 for each."""
    from torchao.float8.float8_utils import amax_to_scale

    return list(amax_to_scale(largest, torch.float8_e4m3fn).unbind())


def row_scales(largest: torch.Tensor) -> torch.Tensor:
    """The scales of the recipe rowwise by the largest values of rows, in their shape: powers of two, in float32."""
    from torchao.float8.float8_utils import amax_to_scale

    scales: torch.Tensor = amax_to_scale(largest, torch.float8_e4m3fn, round_scales_to_power_of_2=True)
    return scales


def scaled_to_float8(tensor: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of a tensor in float8, by scales that its shape broadcasts with."""
    from torchao.float8.float8_utils import to_fp8_saturated

    values: torch.Tensor = to_fp8_saturated(tensor.to(torch.float32) * scales, torch.float8_e4m3fn)
    return values


def float8_of(weight: torch.Tensor, scale: torch.Tensor, linear: Any) -> torch.Tensor:
    """The values of a linear's weight, or of a part of it, in float8."""
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    made = hp_tensor_and_scale_to_float8(weight, scale, torch.float8_e4m3fn, linear.linear_mm_config)
    data: torch.Tensor = made._data
    return data


def gathered_float8(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, linear: Any) -> torch.Tensor:
    """The tensor that a linear in float8 takes for its weight without a cast. `data` are bytes, `dtype` is that of products."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    values = data.view(torch.float8_e4m3fn)
    made: torch.Tensor = Float8TrainingTensor(
        values, scale, dtype, linear.linear_mm_config, gemm_input_role=GemmInputRole.WEIGHT
    )
    return made


def cast_input(x: torch.Tensor, linear: Any) -> torch.Tensor:
    """The input of a linear in float8, with the scale of the whole tensor. Collective where `x` is a sharded DTensor; its
    gradient is that of the result.
    """
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    made: torch.Tensor = hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, linear.linear_mm_config)
    return made


def with_bytes(given: Any, data: torch.Tensor) -> torch.Tensor:
    """What a tensor in float8 is a part of, by its bytes."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    made: torch.Tensor = Float8TrainingTensor(
        data.view(given._data.dtype),
        given._scale,
        given._orig_dtype,
        given._linear_mm_config,
        given._gemm_input_role,
    )
    return made


def bytes_of(given: Any) -> torch.Tensor:
    """The bytes of a tensor in float8."""
    data: torch.Tensor = given._data
    return data.view(torch.uint8)


def rescaled(weight: Any, scale: torch.Tensor) -> None:
    """Give a weight that was gathered before, and whose bytes are new, the new scale."""
    local: Any = local_tensor(weight) if isinstance(weight, DTensor) else weight
    local._scale = scale
