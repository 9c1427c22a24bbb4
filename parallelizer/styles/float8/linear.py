"""A linear that computes in float8: torchao's forward on a module that stays what it is."""

from __future__ import annotations

from types import MethodType

from torch import nn

from parallelizer.styles.float8.torchao_private import converted, linear_config


def run_in_float8(module: nn.Module, recipe: str, *, emulate: bool = False) -> None:
    """From now on a linear's matrix products, forward and backward, are in float8.

    `recipe` is torchao's name of one. The class and the parameters of the module stay. With `emulate` factors are rounded
    to float8, and products are made in float32.
    """
    twin = converted(module, linear_config(recipe, emulate))
    for name in ("config", "linear_mm_config"):  # what its forward reads beside the parameters
        setattr(module, name, getattr(twin, name))
    module.forward = MethodType(type(twin).forward, module)


def computes_in_float8(module: nn.Module) -> bool:
    """Whether `run_in_float8` was called for a module."""
    return hasattr(module, "linear_mm_config")
