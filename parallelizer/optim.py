"""The optimizer, and its learning rate as a function of the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError

FUSED_DEVICES = ("cpu", "cuda")
FUSED_CLASSES = (Adam, AdamW)
"""Of torch's classes with a fused kernel those whose kernel takes DTensors."""


def build_optimizer(model: nn.Module, config: Mapping[str, Any]) -> AdamW:
    """AdamW over the parameters that want gradients; those of fewer than two dimensions are not decayed.

    `config` gives `lr`, `betas`, `eps`, `weight_decay` and `fused` (true, false, or auto: where the devices
    have the kernel); other keys are not read. PlanError `optim-invalid` for values that AdamW refuses.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = config["fused"]
    if fused == "auto":
        fused = _has_fused_kernel(parameters)
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


def _has_fused_kernel(parameters: Iterable[Tensor]) -> bool:
    return all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)


def parameter_groups(parameters: Iterable[Tensor], weight_decay: float | None = None) -> list[dict[str, Any]]:
    """Groups for any torch optimizer, by device mesh, and by weight decay if one is given: parameters of fewer than two
    dimensions are then not decayed. Without it, the groups leave weight decay to the optimizer's own argument.

    The groups are separate for each mesh, because a fused or foreach kernel runs over one group and cannot
    mix plain tensors and DTensors, or DTensors of two meshes. torch raises an error for such a group only
    in the first step.
    """
    members: dict[tuple[Any, float | None], list[Tensor]] = {}
    for p in parameters:
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        decay = 0.0 if weight_decay is not None and p.ndim < 2 else weight_decay
        members.setdefault((mesh, decay), []).append(p)
    return [
        {"params": params} | ({} if decay is None else {"weight_decay": decay})
        for (_, decay), params in members.items()
    ]


SCHEDULE_KEYS = ("warmup", "final_ratio", "schedule", "decay")
"""The keys of `optim` that are no optimizer's."""


def optimizer_of(kind: Callable[..., Optimizer], model: nn.Module, config: Mapping[str, Any]) -> Optimizer:
    """An optimizer class of torch's kind over the parameters that want gradients, with the keys of `config` as arguments.

    `_target_` and the keys of the schedule are left out. `fused: auto` is true for Adam and AdamW where the devices have the
    kernel, unless `foreach` or `differentiable` is set, which it does not go with; else it is left to the class.
    `weight_decay` is that of parameters of two dimensions and more. Raises what the class raises.
    """
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in config.items()
        if name not in ("_target_", *SCHEDULE_KEYS) and (name, value) != ("fused", "auto")
    }
    taken = inspect.signature(kind).parameters
    parameters = [p for p in model.parameters() if p.requires_grad]
    other_way = any(arguments.get(key) for key in ("foreach", "differentiable"))
    if config.get("fused") == "auto" and kind in FUSED_CLASSES and not other_way:
        arguments["fused"] = _has_fused_kernel(parameters) or None
    decay: Any = (
        arguments.get("weight_decay", taken["weight_decay"].default) if "weight_decay" in taken else None
    )
    return kind(parameter_groups(parameters, decay), **arguments)


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup: int,
    total: int,
    final_ratio: float,
    schedule: str = "cosine",
    decay: float = 0.2,
) -> float:
    """The learning rate of `step` (from 0): `warmup` steps linear to `peak`, then by the `schedule` to
    `final_ratio` of the peak.

    `cosine` is half a cosine, `linear` a line. `wsd` stays at the peak and falls linearly over the last
    share `decay` of all steps. `constant` stays at the peak and ignores `final_ratio`. Step `warmup - 1` is
    the first at `peak`; step `total - 1` and any later step are at `peak * final_ratio`.
    """
    done = step + 1
    if done <= warmup:
        return peak * done / warmup
    if schedule == "constant":
        return peak
    first = warmup  # steps before it goes down
    if schedule == "wsd":
        first = max(warmup, total - round(decay * total))
    progress = min(1.0, max(0, done - first) / max(1, total - first))
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress
    return peak * (final_ratio + (1 - final_ratio) * left)
