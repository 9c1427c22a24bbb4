"""A function mode that a whole training step can run under."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class FunctionMode(TorchFunctionMode):
    """A function mode that stays on in backward, where a checkpoint runs parts of forward again. By itself it
    changes no call.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.backward:
            return self._backward(*args, **kwargs)
        return self.call(func, args, kwargs)

    def _backward(
        self, tensor: torch.Tensor, gradient: torch.Tensor | None = None, *args: Any, **kwargs: Any
    ) -> None:
        # torch calls a mode with the mode itself off. A gradient edge is no tensor, so that no mode is asked
        # a second time.
        edge = torch.autograd.graph.get_gradient_edge(tensor)
        start = torch.ones_like(tensor) if gradient is None else gradient
        with self:
            torch.autograd.backward(edge, start, *args, **kwargs)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the mode makes of one call."""
        return func(*args, **kwargs)
