"""Weights that `torch.nn.utils.weight_norm` computes and keeps, which no copy of the model can have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.fold import fold_paths

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation


def computed_tensors(state: Compilation) -> Iterator[Diagnostic]:
    """No module keeps a weight that autograd computed from a magnitude and a direction. Other results that a forward has left in
    attributes are no mistake: the next forward replaces them.
    """
    held = []
    for path, module in state.modules.items():
        own = {name for name, _ in module.named_parameters(recurse=False)}
        held += [
            f"{path}.{name}".lstrip(".")
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor) and value.grad_fn is not None
            if {f"{name}_g", f"{name}_v"} <= own
        ]
    if held:
        yield Diagnostic(
            "computed-tensor",
            f"torch.nn.utils.weight_norm keeps {', '.join(fold_paths(held)[:3])} as a tensor that it computed, and a module with "
            "such a tensor cannot be copied",
            None,
            "use torch.nn.utils.parametrizations.weight_norm",
        )
