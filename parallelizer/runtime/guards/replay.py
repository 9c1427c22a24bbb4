"""Repeats the forward and backward of a step, to find the first value on this rank that is not finite.

Hooks check the outputs of every module, and the gradients in backward, before and after the collectives that
a plan adds around the module. So a value is found where it first occurs, before a collective spreads it. All
ranks number the checks in the same way; the check with the lowest number is the source. The stages of a pipeline
number theirs one after the other: forward from the first to the last, and backward to the first again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from parallelizer.compiler.observe import phase
from parallelizer.language.plan import full_name
from parallelizer.runtime.loss_sums import loss_sums
from parallelizer.runtime.state import kept_buffers, state_of
from parallelizer.runtime.step import Batch, Loss, accumulate
from parallelizer.torch_private import tree_leaves, tree_map_tensors

Where = Literal["forward", "loss", "backward"]


@dataclass(frozen=True)
class Sighting:
    """The first number that is not finite: in which part of the batch, as the how many-th thing looked at, where. In a
    pipeline each microbatch is a part.

    `module` is whose own code made it, `near` the module inside that saw it first, if one did; `parameter` is whose
    gradient it is, if it is one's.
    """

    part: int
    order: int
    where: Where
    module: str
    kind: str
    near: str = ""
    parameter: str = ""


def replay(model: nn.Module, parts: Sequence[Batch], loss: Loss) -> Sighting | None:
    """Run forward and backward of all parts, and return what was seen first on this rank. Collective.

    Gradients are added to those that there are; buffers are put back. Compiled modules run as they are written, or
    there would be nothing to look into.
    """
    look = _Lookout(model)
    put_back = kept_buffers(model)
    try:
        with torch.compiler.set_stance("force_eager"), look:
            accumulate(model, parts, look.at_loss(loss))
    finally:
        put_back(None)
    return look.first


class _Pass(NamedTuple):
    """A part of the batch, and the stage that it runs through: 0 of a model that is not cut."""

    part: int
    stage: int


_CHECKS = 40
"""Bits of a check's number that count the checks of a rank; those above say how deep in the pipeline its stage lies."""


class _Lookout:
    """The hooks, and what they have seen. `now` is the pass forward that runs, and `back` the one backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        state = state_of(model)
        self.pipeline = None if state is None else state.pipeline
        self.first: Sighting | None = None
        self.now = self.back = _Pass(0, 0)
        self.order = 0
        self.begun: Counter[int] = Counter()
        self.inside: list[str] = []
        self.handles: list[RemovableHandle] = []
        self.on_parameters: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for path, module in self._hooked():
            own = next(module.parameters(), None) is not None
            self.handles += [
                # Behind every hook that prepares the inputs, before all those that prepare the outputs, and behind them.
                module.register_forward_pre_hook(self._begin(path), with_kwargs=True),
                module.register_forward_hook(self._look(path, own, last=False), prepend=True),
                module.register_forward_hook(self._look(path, own, last=True)),
            ]

    def _hooked(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that run on this rank, by their paths in the model."""
        if self.pipeline is None:
            yield from self.model.named_modules()
            return
        seen = set[nn.Module]()  # two stages may compute the same module
        for index, stage in self.pipeline.models.items():
            self.handles.append(stage.register_forward_pre_hook(self._begin_stage(index)))
            for path, module in stage.model.named_modules():
                if stage.runs(path) and module not in seen:
                    seen.add(module)
                    yield path, module

    def _begin_stage(self, index: int) -> Any:
        def hook(*_: Any) -> None:
            self.now = _Pass(self.begun[index], index)
            self.begun[index] += 1
            self.inside.clear()  # a stage leaves the modules around its last one by an exception

        return hook

    def __exit__(self, *_: object) -> None:
        for handle in (*self.handles, *self.on_parameters):
            handle.remove()

    def at_loss(self, loss: Loss) -> Loss:
        """The same loss, looked at; a part ends with its backward, which follows."""

        def looked(output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            total, weight = loss_sums(loss, output, batch)
            self._see("loss", "", _kind(total.detach()))
            if total.requires_grad:
                total.register_hook(self._end_of_part(self.now))
            return total, weight

        return looked

    def _end_of_part(self, ended: _Pass) -> Any:
        def hook(_: torch.Tensor) -> None:
            # The gradient of the loss comes first in backward: what is forward then belongs to the next part.
            self.back = ended
            if self.pipeline is None:
                self.now = _Pass(ended.part + 1, 0)

        return hook

    def _see(self, where: Where, module: str, kind: str, near: str = "", parameter: str = "") -> None:
        self.order += 1
        if not kind:
            return
        at = self.back if where == "backward" else self.now
        last = 0 if self.pipeline is None else self.pipeline.last
        depth = at.stage if where != "backward" else 2 * last + 1 - at.stage
        order = (depth << _CHECKS) + self.order
        if self.first is None or (at.part, order) < (self.first.part, self.first.order):
            self.first = Sighting(at.part, order, where, module, kind, near, parameter)

    def _begin(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if phase.current() != "forward":  # a checkpoint computes again what was looked at before
                return None
            around = self.inside[-1] if self.inside else ""
            self.inside.append(path)
            self._see("forward", around, _kinds((args, kwargs)), near=path)
            for name, param in module.named_parameters(recurse=False):
                if param.requires_grad:
                    full = full_name(path, name)
                    self.on_parameters.append(param.register_hook(self._gradient(path, parameter=full)))

            def own_view(tensor: torch.Tensor) -> torch.Tensor:
                if not tensor.requires_grad:
                    return tensor
                # A tensor of this module's own: its gradient has nothing of other users' in it.
                view = tensor.view_as(tensor)
                view.register_hook(self._gradient(path))
                return view

            return tree_map_tensors(own_view, (args, kwargs))

        return hook

    def _look(self, path: str, own: bool, *, last: bool) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if phase.current() != "forward":
                return
            if last:
                self.inside.pop()
            around = self.inside[-1] if self.inside and last else ""
            self._see("forward", path, _kinds(output, masks=not own))
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._gradient(around if last else path, near=path if last else ""))

        return hook

    def _gradient(self, module: str, near: str = "", parameter: str = "") -> Any:
        of = self.now

        def hook(gradient: torch.Tensor) -> None:
            if not parameter:  # whose hook stays for the parts that follow
                self.back = of
            self._see("backward", module, _kind(gradient.detach()), near, parameter)

        return hook


def _kinds(values: Any, masks: bool = True) -> str:
    """How the tensors in a tree are not finite; with `masks`, minus infinity alone is what a mask is made of."""
    for tensor in tree_leaves(values):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            kind = _kind(tensor.detach(), masks)
            if kind:
                return kind
    return ""


def _kind(tensor: torch.Tensor, masks: bool = False) -> str:
    """`NaN`, `inf` or, where all is finite, nothing, of what this rank holds of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.numel() or not (local.is_floating_point() or local.is_complex()):
        return ""
    if bool(torch.isfinite(local).all()):
        return ""
    if bool(torch.isnan(local).any()):
        return "NaN"
    if masks and not bool(torch.isposinf(local).any()):
        return ""
    return "infinite"
