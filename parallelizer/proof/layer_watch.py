"""The operators of one forward, by the layer that they run in or behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelizer.compiler.observe.calling import call
from parallelizer.compiler.observe.remembered_results import RememberedResults
from parallelizer.compiler.observe.running_module import Running
from parallelizer.language.workload import Workload
from parallelizer.torch_private import GroupedProducts, tree_leaves


@dataclass
class LayerStay:
    """One call of a layer, and what runs behind it: each operator with its constants and sizes."""

    container: str
    index: int
    inside: list[tuple[str, ...]] = field(default_factory=list)
    behind: list[tuple[str, ...]] = field(default_factory=list)


def layer_stays(model: nn.Module, workload: Workload) -> list[LayerStay] | None:
    """Every call of a layer in one forward of `model`, which is on meta. None when it does not run so."""
    watch = _LayerWatch(model)
    try:
        with torch.device("meta"), torch.no_grad(), GroupedProducts(), watch:
            call(model, workload.example(1, workload.seq_len, "meta"))
    except Exception:  # whatever somebody's forward raises: the trace tells it
        return None
    return watch.stays


class _LayerWatch(RememberedResults):
    """Notes every operator, by the layer that it runs in or behind."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.running = Running(model)
        self.lists = {
            path for path, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and path
        }
        self.stays: list[LayerStay] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.result(func, args, kwargs or {})
        layer = self._layer()
        constants = [x for x in tree_leaves((args, kwargs)) if not isinstance(x, torch.Tensor)]
        shapes = [tuple(x.shape) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if layer is None:
            if self.stays:
                self.stays[-1].behind.append((str(func), repr((constants, shapes))))
            return result
        container, index, path = layer
        if (
            not self.stays
            or (self.stays[-1].container, self.stays[-1].index) != (container, index)
            or self.stays[-1].behind
        ):
            self.stays.append(LayerStay(container, index))
        self.stays[-1].inside.append((f"{func} in {path}", repr((constants, shapes))))
        return result

    def _layer(self) -> tuple[str, int, str] | None:
        """The outermost list that the running module lies in, its layer's index, and the path from there."""
        parts = self.running.current.split(".")
        for end in range(1, len(parts)):
            container = ".".join(parts[:end])
            if container in self.lists and parts[end].isdigit():
                return container, int(parts[end]), ".".join(parts[end + 1 :])
        return None
