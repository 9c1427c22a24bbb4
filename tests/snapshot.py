"""Everything about a model that compiling or a refused application might change."""

from __future__ import annotations

from typing import Any

from torch import nn


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Types, attributes, hooks, parameters and buffers of every module, by identity."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        attributes = {
            k: id(v) for k, v in vars(module).items() if not k.endswith("_hooks") and not k.startswith("_")
        }
        hooks = {k: list(v) for k, v in vars(module).items() if k.endswith("_hooks") or k.endswith("_kwargs")}
        tensors = {n: id(t) for n, t in [*module._parameters.items(), *module._buffers.items()]}
        found[path] = (type(module), attributes, hooks, tensors, module.training, sorted(vars(module)))
    return found
