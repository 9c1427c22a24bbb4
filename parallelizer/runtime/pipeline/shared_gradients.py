"""The gradients of parameters of which several stages have a copy, such as an embedding that is the output layer too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.runtime.gradients import own_part
from parallelizer.runtime.pipeline.live import LivePipeline, SharedParameter


def sum_shared(model: nn.Module, pipeline: LivePipeline) -> None:
    """Give every copy of a parameter the sum of the gradients of all copies. Collective over the ranks that have copies.

    Copies lie alike, so that each rank sums what it holds with what the others hold of the same numbers. A copy without a
    gradient counts as zero.
    """
    for copies in _by_name(pipeline.shared):
        named = [model.get_parameter(one.here) for one in copies]
        params = list({id(p): p for p in named}.values())  # names of one stage may be one parameter
        if not params[0].requires_grad:
            continue
        held = [
            own_part(p.grad) if p.grad is not None else torch.zeros_like(own_part(p.detach())) for p in params
        ]
        total = held[0] if len(held) == 1 else torch.stack(held).sum(0)
        if copies[0].group is not None:
            # In float32 at least: ranks of gloo would sum bfloat16 each in another order.
            wide = total.to(torch.promote_types(total.dtype, torch.float32))
            dist.all_reduce(wide, group=copies[0].group)
            total = wide.to(total.dtype)
        for param, own in zip(params, held, strict=True):
            own.copy_(total)
            if param.grad is None:
                param.grad = _like(param, own)


def counted(model: nn.Module, pipeline: LivePipeline | None) -> list[nn.Parameter]:
    """The parameters of this rank that are trained, without the copies that another stage owns."""
    copies = pipeline.copies if pipeline is not None else ()
    others = {id(model.get_parameter(one.here)) for one in copies}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in others]


def _by_name(shared: Sequence[SharedParameter]) -> list[list[SharedParameter]]:
    """The copies on this rank of each shared parameter."""
    found: dict[str, list[SharedParameter]] = {}
    for one in shared:
        found.setdefault(one.name, []).append(one)
    return [copies for _, copies in sorted(found.items())]


def _like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
