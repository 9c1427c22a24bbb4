"""A linear that computes in float8: torchao's forward on a module that stays what it is."""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn

from parallelizer.styles.float8.torchao_private import converted, float8_forward, linear_config


def run_in_float8(module: nn.Module, recipe: str, *, emulate: bool = False, pad: bool = False) -> None:
    """From now on a linear's matrix products, forward and backward, are in float8.

    `recipe` is torchao's name of one. The class and the parameters of the module stay. With `emulate` factors are rounded
    to float8, and products are made in float32. With `pad` any number of tokens is taken by kernels.
    """
    twin = converted(module, linear_config(recipe, emulate, pad))
    for name in ("config", "linear_mm_config"):  # what its forward reads beside the parameters
        setattr(module, name, getattr(twin, name))
    module.forward = MethodType(forward_in_float8, module)


def forward_in_float8(linear: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """Torchao's forward of a linear. An expert that gets no token has no largest value, and computes a row of zeros instead."""
    if input.numel():
        return float8_forward(linear, input)
    features = input.size(-1)
    row = torch.cat([input.reshape(0, features), input.new_zeros(1, features)])
    out = float8_forward(linear, row)
    return out[:0].reshape(*input.shape[:-1], out.size(-1))


def computes_in_float8(module: nn.Module) -> bool:
    """Whether `run_in_float8` was called for a module."""
    return hasattr(module, "linear_mm_config")
