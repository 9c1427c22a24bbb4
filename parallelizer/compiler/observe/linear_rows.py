"""How many rows each linear of a model multiplies, from one forward on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallelizer.child.children import WorldError, in_children
from parallelizer.compiler.observe.calling import call
from parallelizer.language.workload import Workload
from parallelizer.torch_private import GroupedProducts


def linear_rows(model: nn.Module, workload: Workload, batch_size: int) -> dict[str, set[int]]:
    """The numbers of rows that the calls of each linear have in a forward of `batch_size` sequences on one rank, by module path.

    `model` is on meta and left as it is; it runs in a child of this process. Empty when it does not run so.
    """
    try:
        (found,) = in_children([(_observe, model, workload, batch_size)])
    except WorldError:
        return {}
    rows: dict[str, set[int]] = found
    return rows


def _observe(model: nn.Module, workload: Workload, batch_size: int) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}

    def enter(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor):
                found.setdefault(path, set()).add(args[0].shape[:-1].numel())

        return hook

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(enter(path))
    with torch.no_grad(), GroupedProducts():
        call(model, workload.example(batch_size, workload.seq_len, "meta"))
    return found
