"""What of a transformers model depends on how its sequence lies, and where a program cuts it.

A transformers model makes masks, and often positions, from the length of its embedded tokens. Under context parallelism
that is a rank's part of the sequence; where the embedding hands on a stream that is split over tp, it is a part too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from parallelizer.hugging_face.architecture import is_model
from parallelizer.hugging_face.build import IMPLEMENTATION, register
from parallelizer.hugging_face.masks import written_out
from parallelizer.language.plan import TENSOR_AXES

if TYPE_CHECKING:
    from parallelizer.styles.application import Application, Program

PLAIN = "sdpa"
"""transformers' name for the attention that calls scaled_dot_product_attention."""

TOKENS = ("input_ids", "inputs_embeds")
"""What a model may be given as its sequence."""


def embedding(model: Any) -> str | None:
    """The path of the module that embeds tokens; None where transformers does not say."""
    try:
        found = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return next((path for path, module in model.named_modules() if module is found), None)


def splits_context(applications: Iterable[Application]) -> Application | None:
    """An application of context parallelism, if the sequence is split before the model's forward."""
    attention = None
    for a in applications:
        if a.slot == "io" and "cp" in a.axes:
            return None
        if a.slot == "attention" and attention is None:
            attention = a
    return attention


def splits_inside(program: Program) -> bool:
    """Whether every rank of cp is given all tokens, and rules split the sequence inside the model."""
    split = (program.plan.batch[name].dim is not None for name in TOKENS if name in program.plan.batch)
    return any(a.slot == "io" and "cp" in a.axes for a in program) and not any(split)


def splits_stream(applications: Iterable[Application], path: str | None) -> Application | None:
    """The application that lets the embedding at `path` hand on the sequence, dimension 1, in parts."""
    for a in applications:
        if path is not None and a.module == path and any(axis in TENSOR_AXES for axis in a.axes):
            flows = a.options.get("output") or {}
            if any(f.wanted is not None and f.wanted.dim in (1, -2) for f in flows.values()):
                return a
    return None


def counts_behind(model: nn.Module, path: str) -> bool:
    """Whether positions that nobody gives are made from embedded tokens, and not from their ids: so it is where the
    embedding is the model's own, and not one of several in a module for them.
    """
    around = model.get_submodule(path.rpartition(".")[0])
    return is_model(around) and takes_positions(model)


def takes_positions(model: nn.Module) -> bool:
    """Whether forward has `position_ids`."""
    return "position_ids" in inspect.signature(model.forward).parameters


def implementation(model: Any) -> str:
    """The attention implementation of the model, or of the first model inside it that has another than ours."""
    every = [m.config._attn_implementation for m in model.modules() if is_model(m)]
    return str(next((name for name in every if name not in (IMPLEMENTATION, PLAIN)), every[0]))


def is_settable(model: Any) -> bool:
    """Whether the model can be given our attention: its class looks attention up by name."""
    return bool(model._can_set_attn_implementation())


def needs_ours(model: Any) -> bool:
    """Whether transformers' sdpa cannot compute the model's attention, and ours can."""
    return written_out(model.config)


def supports_plain(model: Any) -> bool:
    """Whether transformers lets the model call scaled_dot_product_attention."""
    return bool(model._supports_sdpa)


def switch(model: Any, applications: Iterable[Application]) -> None:
    """Let a model on transformers' sdpa make its masks by ours where they depend on how the sequence lies."""
    applications = tuple(applications)
    cut = splits_context(applications) or splits_stream(applications, embedding(model))
    if cut is not None and implementation(model) == PLAIN:
        register()
        model.set_attn_implementation(IMPLEMENTATION)


def has_windows(model: nn.Module) -> bool:
    """Whether a layer sees a part of the sequence only, by a sliding window or in chunks."""
    config: Any = model.config
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    return getattr(config, "sliding_window", None) is not None
