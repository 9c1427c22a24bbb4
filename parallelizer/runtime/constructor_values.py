"""What a model's constructor does to its parameters beyond what their modules do by themselves.

Models are built on meta, and each module then fills its own parameters by `reset_parameters()`. What a constructor adds, as
GPT-2's does to the projections of each residual branch, would be lost without a word.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer.compiler.observe.families import initializer_of
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.diagnostics.units import size
from parallelizer.language.fold import fold_paths

_OWN = frozenset({"reset_parameters", "_reset_parameters"})
"""Methods in which a module fills what is its own."""

_FILLS = frozenset({
    "normal_", "uniform_", "trunc_normal_", "zero_", "fill_", "copy_", "mul_", "div_", "random_", "constant_", "ones_",
    "zeros_", "eye_", "orthogonal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "__setitem__",
})  # fmt: skip
"""Functions, by name, that change the values of the tensor they are given."""

_TORCH = os.path.dirname(torch.__file__) + os.sep

_places: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def watched(build: Callable[[], Any]) -> Any:
    """What `build()` returns; of a module it is remembered whether its constructor fills parameters itself."""
    with _Watch() as watch:
        model = build()
    if watch.place is not None and isinstance(model, nn.Module) and initializer_of(model) is None:
        _places[model] = watch.place
    return model


def filled_at(model: nn.Module) -> str | None:
    """Where (`file:line`) the constructor of a model that was `watched` fills parameters itself; None if it does not."""
    return _places.get(model)


def without_initializer(model: nn.Module) -> list[str]:
    """The modules on meta with parameters or buffers of their own and nothing that fills these, in the model's order."""
    if initializer_of(model) is not None:
        return []
    return [
        path
        for path, module in model.named_modules()
        if any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        and not callable(getattr(module, "reset_parameters", None))
    ]


def needs_whole(model: nn.Module, chosen: str | None) -> bool:
    """Whether only its constructor can give a model on meta its values, as far as `chosen` (`model.initialize`) allows."""
    return (
        chosen == "whole"
        or bool(without_initializer(model))
        or (chosen is None and filled_at(model) is not None)
    )


def told(model: nn.Module, chosen: str | None) -> tuple[Diagnostic, ...]:
    """A warning where every rank will build the model whole, and nobody asked for it."""
    lacking, place = without_initializer(model), filled_at(model)
    if chosen == "whole" or not (lacking or (chosen is None and place)):
        return ()
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    if lacking:
        kinds = sorted({type(model.get_submodule(path)).__name__ for path in lacking})
        why = f"{', '.join(fold_paths(lacking)[:3]) or 'the root'} ({', '.join(kinds[:3])}) cannot fill what they hold"
        advice = "give them a method reset_parameters(), or say `initialize: whole` in the model config, which is this"
    else:
        why = f"its constructor fills parameters itself ({place})"
        advice = (
            "say `initialize: whole` in the model config, which is this, or `modules`, which leaves that out"
        )
    message = f"every rank builds the model whole, {size(held)}, to take its slices of the values: {why}"
    return (Diagnostic("built-whole", message, None, advice, "warning"),)


class _Watch(TorchFunctionMode):
    """Notes the first place where a parameter is filled from outside of its module's own method."""

    def __init__(self) -> None:
        super().__init__()
        self.place: str | None = None
        self.views: list[torch.Tensor] = []
        """Of parameters, by `.data` and `detach()`; held, so that none is taken for another."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        filled = args[0] if args else (kwargs or {}).get("tensor")  # torch.nn.init hands it on by name
        if self.place is None and self._is_parameter(filled):
            if getattr(func, "__name__", "") in _FILLS:
                self.place = _place()
            elif isinstance(result, torch.Tensor) and result is not filled:
                self.views.append(result)
        return result

    def _is_parameter(self, tensor: Any) -> bool:
        return isinstance(tensor, nn.Parameter) or any(tensor is view for view in self.views[-8:])


def _place() -> str | None:
    """Where a parameter is filled right now; None inside of its module's own method."""
    frame, found = sys._getframe(2), None
    while frame is not None:
        code = frame.f_code
        if code.co_name in _OWN:
            return None
        if found is None and code.co_filename != __file__ and not code.co_filename.startswith(_TORCH):
            found = f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return found
