"""Replacing the forward of one module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`around(module, forward, args, kwargs)` runs `forward(*args, **kwargs)` in whatever way it likes."""


def wrap_forward(module: nn.Module, around: Around) -> None:
    """From now on calls of `module.forward` go through `around`; its signature stays.

    The module itself is not wrapped, so that the names of parameters stay as they are. A deep copy of the
    module runs the copy's forward.
    """
    bound = module.forward
    if isinstance(bound, MethodType) and bound.__self__ is module:
        function = bound.__func__

        # Attributes that other code set on the function are not copied.
        @functools.wraps(function, updated=())
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A partial, because torch.compile does not trace the making of a method.
            return around(self, functools.partial(function, self), args, kwargs)

        module.forward = MethodType(method, module)
    else:

        @functools.wraps(bound, updated=())
        def forward(*args: Any, **kwargs: Any) -> Any:
            return around(module, bound, args, kwargs)

        module.forward = forward
