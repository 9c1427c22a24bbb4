"""A function mode that a whole training step can run under."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Ends = torch.Tensor | Sequence[Any]
"""Where a backward begins or ends: a tensor, or tensors and edges of autograd's graph."""


class FunctionMode(TorchFunctionMode):
    """A function mode that stays on in backward, where a checkpoint runs parts of forward again. By itself it
    changes no call.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # A training step calls the first, a stage of a pipeline the others.
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            return self._backward(*args, **kwargs)
        if func is torch.autograd.grad:
            return self._grad(*args, **kwargs)
        return self.call(func, args, kwargs)

    # torch calls a mode with the mode itself off. An edge is no tensor, so that no mode is asked a second time.

    def _backward(self, tensors: Ends, grad_tensors: Ends | None = None, *args: Any, **kwargs: Any) -> None:
        gradients = kwargs.pop("gradient", grad_tensors)
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = _edges(kwargs["inputs"])
        with self:
            torch.autograd.backward(_edges(tensors), _starts(tensors, gradients), *args, **kwargs)

    def _grad(
        self, outputs: Ends, inputs: Ends, grad_outputs: Ends | None = None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        with self:
            return torch.autograd.grad(
                _edges(outputs), _edges(inputs), _starts(outputs, grad_outputs), *args, **kwargs
            )

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the mode makes of one call."""
        return func(*args, **kwargs)


def _listed(ends: Ends) -> list[Any]:
    return [ends] if isinstance(ends, torch.Tensor) or hasattr(ends, "node") else list(ends)


def _edges(ends: Ends) -> list[Any]:
    return [
        torch.autograd.graph.get_gradient_edge(one) if isinstance(one, torch.Tensor) else one
        for one in _listed(ends)
    ]


def _starts(ends: Ends, given: Ends | None) -> list[Any]:
    """The gradient at each end; ones where none is given, as torch has it for scalars."""
    tensors = _listed(ends)
    gradients = [None] * len(tensors) if given is None else _listed(given)
    return [
        torch.ones_like(end) if gradient is None and isinstance(end, torch.Tensor) else gradient
        for end, gradient in zip(tensors, gradients, strict=True)
    ]
