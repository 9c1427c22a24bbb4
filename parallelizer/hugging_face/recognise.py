"""Which models are transformers', and how such a model is called and filled. Imports nothing of transformers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from parallelizer.styles.base import forward_names

OURS_ALONE = frozenset({"labels"})
"""Entries of a batch that a model is not given for its `**kwargs` alone: they are the loss's. A transformers model that
names them is not given them either: it would shift labels that are shifted already, inside of each rank's part of the
sequence, and take a mean that is not the batch's.
"""

WHOLE = frozenset({"attention_mask"})
"""Entries of a batch, [batch, sequence], that a transformers model is given whole under context parallelism: what they say
is of keys, of which attention sees all.
"""


def is_pretrained(model: nn.Module) -> bool:
    """Whether the model is a `transformers.PreTrainedModel`."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def inputs_of(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch entries that the model is given: those that its forward takes. Labels go to one that names them, and never
    to a transformers model.
    """
    names, asked = forward_names(model), inspect.signature(model.forward).parameters
    hidden = OURS_ALONE if is_pretrained(model) else OURS_ALONE - {*asked}
    given = {k: v for k, v in batch.items() if (names is None or k in names) and k not in hidden}
    tokens = given.get("input_ids")
    if (
        is_pretrained(model)
        and isinstance(tokens, torch.Tensor)
        and tokens.is_meta
        and "attention_mask" in {*asked} - {*given}
    ):
        # Without values it cannot guess documents from positions, which it does where it has no mask.
        given["attention_mask"] = torch.ones(tokens.shape, dtype=torch.bool, device="meta")
    return given


def logits_of(output: Any) -> Any:
    """The logits of a `ModelOutput`; any other output as it is."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, torch.Tensor) else output


def initializer_of(model: nn.Module) -> Callable[[nn.Module], None] | None:
    """What fills one module's own parameters and buffers, for a transformers model: its `_init_weights`, which is
    transformers' name for it and which every model family overrides; None for any other model.
    """
    if not is_pretrained(model):
        return None
    owners: list[Any] = [m for m in model.modules() if is_pretrained(m)]

    def fill(module: nn.Module) -> None:
        # The innermost model, which all that a causal model is made of belongs to, and whose family shares one method.
        owners[-1]._init_weights(module)

    return fill
