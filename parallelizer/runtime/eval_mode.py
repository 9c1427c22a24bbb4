"""A model in eval mode for a while: afterwards every module is in the mode that it was in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module of the model is in eval mode inside. A module that its author froze by `.eval()` stays frozen, where
    `model.train()` behind an evaluation would wake it.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # a module comes before those in it, which it takes along
            if module.training != training:
                module.train(training)
