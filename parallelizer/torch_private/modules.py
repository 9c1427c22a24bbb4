"""The dictionaries that a module keeps its parts in. See `parallelizer.torch_private`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a state dict has this buffer of the module's own. torch keeps the names of those that it has not in an
    attribute, and a state dict itself runs everybody's hooks. Waits for a public question.
    """
    return name not in module._non_persistent_buffers_set


def has_empty_child(module: nn.Module) -> bool:
    """Whether one of the module's children is None, as a ModuleList may hold: `named_children` leaves those out."""
    return None in module._modules.values()


def twin(
    module: nn.Module,
    kind: type[nn.Module],
    *,
    parameter: Callable[[nn.Parameter], nn.Parameter] | None = None,
    buffer: Callable[[torch.Tensor], torch.Tensor] | None = None,
    child: Callable[[nn.Module], nn.Module] | None = None,
) -> nn.Module:
    """Another module of the class `kind` with all that `module` has: its own parameters, buffers and children are what
    the functions make of them, or the same. No constructor runs. A module keeps these three in private dictionaries, where
    None stands for one that is not there; torch has no public way to copy a module without its values.
    """
    made = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
    for name, function in (("_parameters", parameter), ("_buffers", buffer), ("_modules", child)):
        if function is not None:
            own: dict[str, Any] = getattr(module, name)
            made.__dict__[name] = {n: None if one is None else function(one) for n, one in own.items()}
    return made


def outline_twin(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    """Another module of the same class over the same parameters and buffers, in the same dictionaries, with other children
    and hooks of its own. No constructor runs. Waits for a public way to copy a module without what it holds.
    """
    made = type(module).__new__(type(module))
    made.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if isinstance(value, OrderedDict) and "hooks" in name:
            made.__dict__[name] = value.copy()
    made.__dict__["_modules"] = children
    return made


def empty_twin(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Another module of the same class and attributes that holds nothing and has no hooks; `forward` takes the place of its
    own. See `outline_twin`.
    """
    made = outline_twin(module, {})
    for name, value in module.__dict__.items():
        if isinstance(value, OrderedDict) and "hooks" in name:
            made.__dict__[name] = OrderedDict()
    made.__dict__.update(_parameters={}, _buffers={}, _non_persistent_buffers_set=set(), forward=forward)
    return made


def call_instead(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let `function(real, *args, **kwargs)` take the place of a module's calls, in front of all hooks: `real` is the call with
    them. A forward pre-hook cannot leave a call out.
    """
    real = type(module)._call_impl.__get__(module)
    module.__dict__["_call_impl"] = lambda *args, **kwargs: function(real, *args, **kwargs)


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's children by name, in a dictionary of their own; None where there is none. `named_children` leaves out
    those that stand there twice.
    """
    return dict(module._modules)


def set_child(module: nn.Module, name: str, child: nn.Module) -> None:
    """Put another module into the place of a child, whatever the module's own `__setattr__` does."""
    module._modules[name] = child


def drop_parameter(module: nn.Module, name: str) -> None:
    """Take a parameter of the module's own away, from all twins that share its dictionary."""
    del module._parameters[name]


def in_written_classes(model: nn.Module) -> nn.Module:
    """The same model with the classes that it was written with: FSDP puts its own in front, by which a library that looks
    something up by a class's name does not find it. Modules are copied, tensors and settings shared.
    """
    written = next(
        c for c in type(model).__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule)
    )
    return twin(model, written, child=in_written_classes)


def replace_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer by `function` of it, as `to_empty` does, which takes one device for
    all of them. `Module._apply` is what FSDP watches to take up the new ones; there is no public spelling.
    """
    module._apply(function)
