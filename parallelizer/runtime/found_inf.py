"""Optimizers that leave a step out by a number on their device: torch's `found_inf`, which GradScaler uses too."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer

from parallelizer import torch_private


def takes_found_inf(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether the next step of this optimizer can be left out by a number on `device`, without a read.

    Torch's classes can with `fused=True`. All parameters must lie on the device, or the number would have to be copied to
    others. Every parameter with a gradient must have its states: torch makes them in a step that is left out too, those of SGD
    without a value.
    """
    # The attribute that GradScaler reads. Groups have settings of their own, and of a state dict that was loaded.
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # Whatever else runs with a step does not know that it is left out.
    if _extends_torchs_step(type(optimizer)) or torch_private.has_step_hooks(optimizer):
        return False
    # Classes that GradScaler gives itself to ask the scaler, and not the attribute.
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        return False
    for group in optimizer.param_groups:
        if not group.get("fused", True):
            return False
        stateless = group.get("momentum") == 0  # SGD
        for param in group["params"]:
            if param.device.type != device.type:
                return False
            if param.grad is not None and not stateless:
                state = optimizer.state.get(param)
                if not state or any(value is None for value in state.values()):
                    return False
    return True


def _extends_torchs_step(kind: type[Optimizer]) -> bool:
    """Whether a class has a `step` of its own and the rest, with the attribute of `fused=True`, from one of torch's: what its
    `step` changes beside torch's kernel knows nothing of `found_inf`. A class that has the attribute itself says that it does.
    """
    own = next(base for base in kind.__mro__ if "step" in vars(base))
    if own.__module__.startswith("torch.optim") or "_step_supports_amp_scaling" in vars(own):
        return False
    return any(base is not Optimizer and base.__module__.startswith("torch.optim") for base in own.__mro__)


def step_unless(found: torch.Tensor, optimizer: Optimizer) -> None:
    """`optimizer.step()`, which changes nothing where `found`, a float32 scalar tensor, is 1, and not 0."""
    optimizer.found_inf = found  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
