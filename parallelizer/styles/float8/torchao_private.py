"""Everything that is used of torchao. Names that torchao does not document have their reason beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn


def linear_config(recipe: str, emulate: bool) -> Any:
    """The Float8LinearConfig of a recipe, by torchao's name."""
    from torchao.float8 import Float8LinearConfig

    return dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)


def converted(linear: nn.Module, config: Any) -> nn.Module:
    """A Float8Linear with the parameters of a linear."""
    from torchao.float8 import convert_to_float8_training

    module: nn.Module = convert_to_float8_training(linear, config=config)
    return module


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
