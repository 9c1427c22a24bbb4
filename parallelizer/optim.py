"""The optimizer, and its learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError

FUSED_DEVICES = ("cpu", "cuda")


def build_optimizer(model: nn.Module, config: Mapping[str, Any]) -> AdamW:
    """AdamW over the parameters that want gradients; those of fewer than two dimensions are not decayed.

    `config` gives `lr`, `betas`, `eps`, `weight_decay` and `fused` (true, false, or auto: where the devices
    have the kernel); other keys are not read. PlanError `optim-invalid` for values that AdamW refuses.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = config["fused"]
    if fused == "auto":
        fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)
    try:
        return AdamW(
            parameter_groups(parameters, config["weight_decay"]),
            lr=config["lr"],
            betas=tuple(config["betas"]),
            eps=config["eps"],
            # None leaves the choice to torch: one kernel over all parameters on GPU, a loop on CPU.
            fused=fused or None,
        )
    except (TypeError, ValueError) as error:
        help = "see the keys of optim in the configuration"
        raise PlanError([Diagnostic("optim-invalid", f"AdamW refuses: {error}", help=help)]) from error


def parameter_groups(parameters: Iterable[Tensor], weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Groups for any optimizer of torch, by weight decay and by device mesh; parameters of fewer than two dimensions are
    not decayed.

    By mesh, because a fused or foreach kernel runs over one group, and cannot take plain tensors and DTensors together,
    or DTensors of two meshes: torch refuses them late, in the first step.
    """
    members: dict[tuple[Any, float], list[Tensor]] = {}
    for p in parameters:
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        members.setdefault((mesh, weight_decay if p.ndim >= 2 else 0.0), []).append(p)
    return [{"params": params, "weight_decay": decay} for (_, decay), params in members.items()]


def learning_rate(step: int, *, peak: float, warmup: int, total: int, final_ratio: float) -> float:
    """The rate of `step` (from 0): `warmup` steps linear to `peak`, then half a cosine to its `final_ratio`.

    Step `warmup - 1` is the first at `peak`; step `total - 1`, and any later one, is at `peak * final_ratio`.
    """
    done = step + 1
    if done <= warmup:
        return peak * done / warmup
    progress = min(1.0, (done - warmup) / max(1, total - warmup))
    return peak * (final_ratio + (1 - final_ratio) * (1 + math.cos(math.pi * progress)) / 2)
