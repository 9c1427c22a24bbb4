"""Which module is running, forward and backward, for the recorders."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class Running:
    """A stack of module paths kept by hooks. In backward a module runs from the gradient of its outputs to that of its inputs."""

    def __init__(self, model: nn.Module) -> None:
        self.active: list[str] = [""]
        self.failed = ""
        self.handles: list[Any] = []
        for path, module in model.named_modules():
            if path:
                self.handles.append(module.register_forward_pre_hook(self._enter(path), prepend=True, with_kwargs=True))
                self.handles.append(module.register_forward_hook(self._leave(path), always_call=True))

    @property
    def current(self) -> str:
        """The innermost module that is running; empty for the root or none."""
        return self.active[-1]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()

    def restart(self) -> None:
        """Forget what is running: between the phases of a step nothing is."""
        del self.active[1:]

    def _enter(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                    tensor.register_hook(lambda _: self._pop(path))
            self.active.append(path)

        return hook

    def _leave(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if output is None and not self.failed:
                self.failed = path  # the innermost forward that raised is the first to be left without an output
            self._pop(path)
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                    tensor.register_hook(lambda _: self._push(path))

        return hook

    def _push(self, path: str) -> None:
        if path not in self.active:
            self.active.append(path)

    def _pop(self, path: str) -> None:
        if path in self.active:
            del self.active[len(self.active) - 1 - self.active[::-1].index(path)]
