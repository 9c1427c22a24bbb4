"""Detects values that a model's constructor gives to parameters beyond the initialisation of their modules.

Models are built on meta, and each module then fills its own parameters by `reset_parameters()`. Values that a
constructor sets in addition, as GPT-2's does for the projections of each residual branch, would be lost
without a message.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer import torch_private
from parallelizer.compiler.observe.families import initializer_of
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.diagnostics.units import size
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import full_name

_OWN = frozenset({"reset_parameters", "_reset_parameters"})
"""Methods in which a module fills what is its own."""

_FILLS = frozenset({
    "normal_", "uniform_", "trunc_normal_", "zero_", "fill_", "copy_", "mul_", "div_", "random_", "constant_", "ones_",
    "zeros_", "eye_", "orthogonal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "__setitem__",
})  # fmt: skip
"""Functions, by name, that change the values of the tensor they are given."""

_LOOKED_AT = 1 << 24
"""The most numbers of a module that are computed to see whether an initializer fills them; of a larger one whoever fills it
tells.
"""

_TORCH = os.path.dirname(torch.__file__) + os.sep

_places: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()
"""Of models that were looked at: where the constructor fills parameters itself; None where it does not."""


def watched(build: Callable[[], Any]) -> Any:
    """What `build()` returns; of a module it is remembered whether its constructor fills parameters itself."""
    with _Watch() as watch:
        model = build()
    if isinstance(model, nn.Module):
        _places[model] = watch.place if initializer_of(model) is None else None
    return model


def look(model: nn.Module) -> None:
    """Remember whether the constructor of a model on meta, which was not watched, fills parameters itself.

    To be called before anything changes the model. Each operation in place counts a version of its parameter, on meta
    too: a parameter with more versions than its module's `reset_parameters()` gives it was filled by other code.
    `.data` counts no versions; where a constructor uses it, the source of its class says so.
    """
    if model in _places:
        return
    place = None
    if initializer_of(model) is None:
        place = _filled_twice(model) or _fills_data(model)
    _places[model] = place


def accept(model: nn.Module) -> None:
    """From now on it is taken as meant that what the model's constructor fills is left to `reset_parameters()`."""
    _places[model] = None


def filled_at(model: nn.Module) -> str | None:
    """Where (`file:line`, or the name of a parameter) the constructor of a model that was `watched`, or looked at, fills
    parameters itself; None if it does not.
    """
    return _places.get(model)


def without_initializer(model: nn.Module) -> list[str]:
    """The modules on meta with parameters or buffers of their own that nothing fills, or of a family's model nothing fills
    all of, in the model's order.
    """
    initializer = initializer_of(model)
    known: dict[tuple[object, ...], bool] = {}
    found = []
    for path, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if not any(tensor.is_meta for _, tensor in own):
            continue
        if initializer is None:
            lacks = not callable(getattr(module, "reset_parameters", None))
        else:
            kind = type(module), *(name for name, _ in own)
            if kind not in known:
                known[kind] = _leaves_some(module, initializer)
            lacks = known[kind]
        if lacks:
            found.append(path)
    return found


def _leaves_some(module: nn.Module, initializer: Callable[[nn.Module], None]) -> bool:
    """Whether an initializer fills less than all floats of a module. On meta each operation in place counts a version, though
    no value is computed. Some of torch's initialisers do nothing there: what looks unfilled is looked at with values.
    """
    if not any(t._version == 0 for t in _filled(module, initializer, "meta")):
        return False
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if sum(tensor.numel() for tensor in own) > _LOOKED_AT:
        return False
    return any(bool(t.isnan().any()) for t in _filled(module, initializer, "cpu"))


def _filled(module: nn.Module, initializer: Callable[[nn.Module], None], device: str) -> list[torch.Tensor]:
    """The floats of a module, full of NaN before, as an initializer leaves them; none where it fails: then whoever runs it
    tells.
    """

    def empty(like: torch.Tensor) -> torch.Tensor:
        nan = torch.nan if like.is_floating_point() else 0
        return torch.full(like.shape, nan, dtype=like.dtype, device=device)

    copy = torch_private.twin(
        module, type(module), parameter=lambda p: nn.Parameter(empty(p), p.requires_grad), buffer=empty
    )
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            initializer(copy)
    except Exception:
        return []
    own = (*copy.parameters(recurse=False), *copy.buffers(recurse=False))
    return [tensor for tensor in own if tensor.is_floating_point()]


def needs_whole(model: nn.Module, chosen: str | None) -> bool:
    """Whether only its constructor can give a model on meta its values, as far as `chosen` (`model.initialize`) allows."""
    return (
        chosen == "whole"
        or bool(without_initializer(model))
        or (chosen is None and filled_at(model) is not None)
    )


def told(model: nn.Module, chosen: str | None) -> tuple[Diagnostic, ...]:
    """A warning that every rank will build the whole model, if the configuration did not ask for this."""
    place, lacking = filled_at(model), without_initializer(model)
    if chosen == "whole" or not (lacking or (chosen is None and place)):
        return ()
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    if lacking:
        kinds = list(dict.fromkeys(type(model.get_submodule(path)).__name__ for path in lacking))
        paths = [path or "the root" for path in fold_paths(lacking)]
        which = f"{', '.join(paths[:3])} ({', '.join(kinds[:3])})"
        why = f"no method initializes the parameters of {which}"
        advice = "add reset_parameters() to these modules, or accept this with `initialize: whole` in the model config"
    else:
        why = f"its constructor fills parameters itself ({place})"
        advice = (
            "accept this with `initialize: whole` in the model config; `initialize: modules` ignores what the "
            "constructor does"
        )
    message = f"every rank builds the whole model, {size(held)}, and keeps its part of the values: {why}"
    return (Diagnostic("built-whole", message, None, advice, "warning"),)


def _filled_twice(model: nn.Module) -> str | None:
    """The name of a parameter on meta that was filled more often than its module does by itself."""
    versions: dict[int, int] = {}
    filled: dict[int, int] = {}
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not any(p.is_meta for p in own.values()) or not callable(
            getattr(module, "reset_parameters", None)
        ):
            continue
        for name, times in _own_versions(module).items():
            number = id(own[name])
            names.setdefault(number, full_name(path, name))
            versions[number] = torch_private.version(own[name])
            filled[number] = max(times, filled.get(number, 0))  # a tied one may be another module's too
    return next((names[n] for n in versions if versions[n] > filled[n]), None)


def _own_versions(module: nn.Module) -> dict[str, int]:
    """How often `reset_parameters()` changes each of a module's own parameters. The module stays as it is."""

    def anew(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta")

    made = torch_private.twin(
        module, type(module), parameter=lambda p: nn.Parameter(anew(p), p.requires_grad), buffer=anew
    )
    try:
        with torch.device("meta"):
            made.reset_parameters()  # type: ignore[operator]
    except Exception:  # a user's method; `materialize` runs it again and reports the error
        return {}
    return {n: torch_private.version(p) for n, p in made.named_parameters(recurse=False)}


_DATA = re.compile(r"\.data\s*(\[.*\]\s*=[^=]|=[^=]|\.\w+_\()")
"""An assignment to `.data`, or a method of it that works in place."""


def _fills_data(model: nn.Module) -> str | None:
    """Where (`file:line`) a constructor fills parameters through `.data`: itself, or in a method that it names."""
    for kind in {type(module): None for module in model.modules()}:
        if kind.__module__.partition(".")[0] == "torch" or "__init__" not in vars(kind):
            continue
        for name, method in vars(kind).items():
            function = getattr(method, "__func__", method)
            if not inspect.isfunction(function) or name in _OWN:
                continue
            if name != "__init__" and name not in kind.__init__.__code__.co_names:
                continue
            try:
                lines, first = inspect.getsourcelines(function)
            except (OSError, TypeError):  # no file: typed in at a prompt
                continue
            for offset, line in enumerate(lines):
                if _DATA.search(line.partition("#")[0]):
                    return f"{function.__code__.co_filename}:{first + offset}"
    return None


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
