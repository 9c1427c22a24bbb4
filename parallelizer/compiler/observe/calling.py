"""How a model is called: the entries of a batch that it takes, and the part of its output that is the logits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from parallelizer.compiler.observe.families import family_of
from parallelizer.styles.target import forward_names

OURS_ALONE = frozenset({"labels"})
"""Entries of a batch that a model is not given for its `**kwargs` alone: they are the loss's. A model of a family that
names them is not given them either: it would shift labels that are shifted already, inside of each rank's part of the
sequence, and take a mean that is not the batch's.
"""


class Routed(NamedTuple):
    """The logits of a mixture whose configuration asks for a balancing loss, and what this loss is computed from: the router's
    logits of each layer, [tokens, experts], which weigh `coefficient`, each token having `top_k` experts. `counted` [tokens]
    says which tokens are no padding; None where all are not.
    """

    logits: torch.Tensor
    router: tuple[torch.Tensor, ...]
    top_k: int
    coefficient: float
    counted: torch.Tensor | None = None


def outcome(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """What losses are computed from: the logits of the model's forward, or a `Routed`."""
    family = family_of(model)
    return call(model, batch) if family is None else family.outcome(model, batch, call)


def call(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """The logits of the model's forward on the batch entries that it takes."""
    return logits_of(model(**inputs_of(model, batch)))


def inputs_of(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch entries that the model is given: those that its forward takes. Labels go to one that names them, and never
    to a model of a family.
    """
    names, family = forward_names(model), family_of(model)
    hidden = OURS_ALONE if family else OURS_ALONE - {*inspect.signature(model.forward).parameters}
    taken = {k: v for k, v in batch.items() if (names is None or k in names) and k not in hidden}
    return family.inputs(model, taken) if family else taken


def logits_of(output: Any) -> Any:
    """The `logits` of an output that has them, as a `ModelOutput` of transformers; any other output as it is."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, torch.Tensor) else output
