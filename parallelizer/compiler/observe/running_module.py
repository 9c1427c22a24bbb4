"""The module that is running, in forward and backward, for the recorders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from parallelizer.compiler.observe import phase
from parallelizer.torch_private import tree_leaves

_RAISED_IN = "_raised_in_module"


class Running:
    """A stack of module paths kept by hooks. In backward a module runs from the gradient of its outputs to
    that of its inputs.

    Between two phases of a step nothing runs. Functions in `started` are called with the path of each module
    that begins. Only `observed` modules have hooks, with their paths; without it all modules have.
    """

    def __init__(self, model: nn.Module, observed: Iterable[tuple[str, nn.Module]] | None = None) -> None:
        self.started: list[Callable[[str], None]] = []
        self.handles: list[Any] = []
        self._active: list[str] = [""]
        self._phase = phase.current()
        self._paths = {id(module): path for path, module in model.named_modules()}
        for path, module in model.named_modules() if observed is None else observed:
            if path:
                self.handles.append(
                    module.register_forward_pre_hook(self._enter(path), prepend=True, with_kwargs=True)
                )
                self.handles.append(
                    module.register_forward_hook(self._leave(path), with_kwargs=True, always_call=True)
                )

    @property
    def current(self) -> str:
        """The innermost module that is running; empty for the root or none."""
        return self._stack()[-1]

    def failed_with(self, error: BaseException) -> str:
        """The innermost module whose forward raised `error`; empty if none did."""
        return getattr(error, _RAISED_IN, "")

    def path_of(self, module: nn.Module) -> str | None:
        """The path of one of the model's modules; None for any other."""
        return self._paths.get(id(module))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()

    def nothing_runs(self) -> None:
        """Between two actions of a pipeline, which may be of one phase."""
        self._active = [""]

    def _stack(self) -> list[str]:
        # A module whose inputs want no gradient never ends in backward: the phase does.
        if phase.current() != self._phase:
            self._active, self._phase = [""], phase.current()
        return self._active

    def _enter(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in tree_leaves((args, kwargs)):
                if _wants_gradient(tensor):
                    tensor.register_hook(lambda _: self._end(path))
            self._stack().append(path)
            self._tell(path)

        return hook

    def _leave(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            error = sys.exc_info()[1]
            if error is not None and not hasattr(error, _RAISED_IN):
                # The innermost is the first to be left. A note here, not there: an error keeps all its frames
                # alive.
                setattr(error, _RAISED_IN, path)
            self._end(path)
            given = {id(value) for value in tree_leaves((args, kwargs))}
            for tensor in tree_leaves(output):
                # What a module only hands on it does nothing to.
                if _wants_gradient(tensor) and id(tensor) not in given:
                    tensor.register_hook(lambda _: self._begin_backward(path))

        return hook

    def _begin_backward(self, path: str) -> None:
        active = self._stack()
        if path in active:
            return
        # Where a module hands on what a module inside it returned, both begin with one gradient, the inner
        # one told first.
        active[:] = [a for a in active if within(path, a)] + [path] + [a for a in active if within(a, path)]
        self._tell(path)

    def _end(self, path: str) -> None:
        active = self._stack()
        if path in active:
            del active[len(active) - 1 - active[::-1].index(path) :]

    def _tell(self, path: str) -> None:
        for listener in self.started:
            listener(path)


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()


def within(path: str, module: str) -> bool:
    """Whether a path is a module or lies inside it."""
    return module == "" or path == module or path.startswith(module + ".")
