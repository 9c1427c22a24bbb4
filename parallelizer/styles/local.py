"""Forward on local shards: a module's DTensor parameters are seen as plain tensors while its own forward runs.

The parameters stay registered as they are, so that optimizers, FSDP, clipping and state dicts see one kind of tensor; only
attribute look-ups inside forward find the local ones. Their gradients come back as DTensors with the placements stated.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


def run_on_locals(module: nn.Module, gradients: Mapping[str, Sequence[Placement]]) -> None:
    """Wrap `module.forward`. `gradients` gives, for each parameter, how its local gradient lies on the parameter's mesh:
    partial where every rank of an axis contributes a part, replicate where all compute the same."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        shadowed = []
        try:
            for name, placements in gradients.items():
                param = getattr(module, name)
                if isinstance(param, DTensor):
                    # An instance attribute is found before a registered parameter, and leaves it untouched.
                    module.__dict__[name] = param.to_local(grad_placements=placements)
                    shadowed.append(name)
            return inner(*args, **kwargs)
        finally:
            for name in shadowed:
                module.__dict__.pop(name, None)

    module.forward = forward  # type: ignore[method-assign]
