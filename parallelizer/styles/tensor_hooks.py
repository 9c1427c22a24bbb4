"""Hooks that convert the inputs of a module, by the names of forward's parameters, and its outputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

Convert = Callable[[torch.Tensor, str], torch.Tensor]
"""Makes another tensor of one that has this name."""


def convert_inputs(module: nn.Module, names: Collection[str], convert: Convert) -> None:
    """Convert the named inputs before any hook sees them that was registered earlier.

    Names are bound by the signature of forward, so that positional and keyword calls are alike; `""` is the first of `*args`.
    """
    signature = inspect.signature(module.forward)
    kinds = {p.kind: p.name for p in signature.parameters.values()}
    others, keywords = kinds.get(inspect.Parameter.VAR_POSITIONAL), kinds.get(inspect.Parameter.VAR_KEYWORD)

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        for name in names:
            if name == "" and others and given.get(others):
                first, *rest = given[others]
                given[others] = (converted(first, name), *rest)
            elif name in signature.parameters:
                if name in given:
                    given[name] = converted(given[name], name)
            elif keywords and name in given.get(keywords, {}):
                given[keywords] = {**given[keywords], name: converted(given[keywords][name], name)}
            else:
                raise RuntimeError(
                    f"a call of {type(module).__name__} has no input {name!r} that a plan's `input` names"
                )
        return bound.args, bound.kwargs

    def converted(value: Any, name: str) -> Any:
        if value is None:  # an optional input
            return None
        if not isinstance(value, torch.Tensor):
            raise RuntimeError(
                f"the input {name!r} of {type(module).__name__} is no tensor but a {type(value).__name__}, which a "
                "plan's `input` cannot lay out"
            )
        return convert(value, name)

    if names:
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)


def convert_outputs(module: nn.Module, keys: Collection[str], convert: Convert) -> None:
    """Convert outputs, by index or key (`""`: the only or the first one), after every hook that was registered earlier.

    The container of a converted tensor is copied, never changed in place.
    """

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        for key in keys:
            output = replaced(output, key)
        return output

    def replaced(output: Any, key: str) -> Any:
        if isinstance(output, torch.Tensor) and key in ("", "0"):
            return convert(output, key)
        if isinstance(output, tuple | list) and (key == "" or key.isdigit()):
            index = int(key or 0)
            if index < len(output) and isinstance(output[index], torch.Tensor):
                items = [convert(x, key) if i == index else x for i, x in enumerate(output)]
                return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
        if isinstance(output, dict):
            name = key if key else next(iter(output), "")
            if isinstance(output.get(name), torch.Tensor):
                changed = copy.copy(output)
                changed[name] = convert(output[name], key)
                return changed
        raise RuntimeError(
            f"the output of {type(module).__name__} ({type(output).__name__}) has no tensor {key or 'first'!r}, which a "
            "plan's `output` names"
        )

    if keys:
        module.register_forward_hook(after)
