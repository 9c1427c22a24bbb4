"""Parameters seen otherwise while a module's own forward runs: the local shards of DTensors, or another
dtype.

The parameters stay registered as they are, so that optimizers, FSDP, clipping and state dicts see one kind of
tensor; only attribute look-ups inside forward find the other. Gradients come back through whatever made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from parallelizer.forwards import wrap_forward

View = Callable[[torch.Tensor], torch.Tensor]


def run_on_locals(module: nn.Module, gradients: Mapping[str, Sequence[Placement]]) -> None:
    """Let forward see local shards. `gradients` gives, for each parameter, how its local gradient lies on the
    parameter's mesh: partial where every rank of an axis contributes a part, replicate where all compute the
    same.
    """
    run_on_views(module, {name: _local_view(placements) for name, placements in gradients.items()})


def run_on_views(module: nn.Module, views: Mapping[str, View]) -> None:
    """Let forward see `views[name](parameter)` in place of each parameter named."""

    def around(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            for name, view in views.items():
                # An instance attribute is found before a registered parameter, and leaves it untouched.
                module.__dict__[name] = view(getattr(module, name))
            return forward(*args, **kwargs)
        finally:
            for name in views:
                module.__dict__.pop(name, None)

    wrap_forward(module, around)


def _local_view(gradient: Sequence[Placement]) -> View:
    def view(param: torch.Tensor) -> torch.Tensor:
        return param.to_local(grad_placements=gradient) if isinstance(param, DTensor) else param

    return view
