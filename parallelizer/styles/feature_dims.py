"""The modules that `colwise` and `rowwise` support: which dimension of their weights is which.

`Conv1D` of transformers is a linear whose weight is stored [in, out], in GPT-2 and its relatives. It is
recognized by its shape and not by its class, so that nothing is imported and copies of it in other packages
work too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class FeatureDims:
    """The dimensions of a weight that count what goes in and what comes out; `rows` says that what goes in are
    numbers of rows, as of an embedding.
    """

    inputs: int
    outputs: int
    rows: bool = False


def feature_dims(module: nn.Module) -> FeatureDims | None:
    """The dimensions of a module's weight; None for a module of another kind."""
    if isinstance(module, nn.Linear):
        return FeatureDims(1, 0)
    if isinstance(module, nn.Embedding):
        return FeatureDims(0, 1, rows=True)
    return FeatureDims(0, 1) if is_conv1d(module) else None


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is a `Conv1D` as transformers has it: `weight` [nx, nf], `bias` [nf], and `nf` outputs."""
    weight, bias, outputs = (getattr(module, name, None) for name in ("weight", "bias", "nf"))
    return (
        isinstance(weight, nn.Parameter)
        and weight.ndim == 2
        and isinstance(outputs, int)
        and weight.shape[1] == outputs
        and (bias is None or (isinstance(bias, nn.Parameter) and bias.shape == (outputs,)))
    )
