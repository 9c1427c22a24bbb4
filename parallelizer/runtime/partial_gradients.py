"""The sum of gradients that lie partial: every rank of an axis has a term of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parallelizer.styles.fsdp_partial import summed_axes

SMALL = 2**20
"""The most bytes of a gradient that is copied in order to be summed together with others. No limit on their sum, so that the
number of all-reduces does not depend on the number of layers.
"""

Pair = tuple[DTensor, DTensor]
"""A parameter and its gradient."""


def sum_partial(parameters: Iterable[torch.Tensor]) -> None:
    """Sum over their axes the gradients that lie partial, so that each lies as its parameter does.

    Sequence parallelism leaves norms' gradients so. Done once here; an optimizer or a norm that meets partial
    gradients would reduce them again in every operation. Small gradients that only have to be summed travel together: a
    model has two of them in each layer, whose all-reduces would take their latency one after the other.
    """
    together: dict[tuple[object, ...], list[Pair]] = {}
    for param in parameters:
        gradient = param.grad
        if not isinstance(param, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements == param.placements:
            continue
        local, axes = gradient.to_local(), summed_axes(gradient.placements, param.placements)
        if axes and local.nbytes <= SMALL:
            kind = (gradient.device_mesh, axes, local.dtype, local.device)
            together.setdefault(kind, []).append((param, gradient))
        else:
            param.grad = gradient.redistribute(placements=param.placements)
    for pairs in together.values():
        _sum_together(pairs)


def _sum_together(pairs: list[Pair]) -> None:
    """Sum gradients of one mesh, one dtype and the same axes by one all-reduce for each axis."""
    param, gradient = pairs[0]
    if len(pairs) == 1:
        param.grad = gradient.redistribute(placements=param.placements)
        return
    parts = [each.to_local() for _, each in pairs]
    flat = torch.cat([part.flatten() for part in parts])
    for axis in summed_axes(gradient.placements, param.placements):
        dist.all_reduce(flat, group=gradient.device_mesh.get_group(axis))
    summed = flat.split([part.numel() for part in parts])
    for (param, _), part, own in zip(pairs, parts, summed, strict=True):
        param.grad = DTensor.from_local(
            own.view(part.shape),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
