"""Checks that a checkpoint fits this model (names, sizes and dtypes) before anything is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from parallelizer.diagnostics.diagnostic import Diagnostic, Span
from parallelizer.language.fold import fold_paths
from parallelizer.runtime.checkpoint.contents import MODEL, OPTIMIZER, trained
from parallelizer.runtime.state import uncut
from parallelizer.runtime.state_dict import StateTensor, state_tensors

SHOWN = 3
"""Names in a message; the others are counted."""


def misfits(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    metadata: Metadata,
    about: Mapping[str, Any],
    place: Span,
    own: Collection[str] | None = None,
) -> list[Diagnostic]:
    """Everything by which a checkpoint is not one of this model, parallel or not, on any device, and of its optimizer.

    `own` are the names of the parameters that the optimizer trains on all ranks, where this rank's has a part of them.
    """
    stored = {
        name.removeprefix(MODEL): tensor
        for name, tensor in metadata.state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(tensor, TensorStorageMetadata)
    }
    tensors = state_tensors(uncut(model))
    found = [*_of_names(tensors, stored, place), *_of_tensors(tensors, stored, place)]
    if not found and optimizer is not None:
        own = trained(tensors, optimizer) if own is None else own
        found += _of_optimizer(own, type(optimizer).__name__, metadata, about, place)
    return found


def _of_names(
    tensors: Mapping[str, StateTensor], stored: Mapping[str, Any], place: Span
) -> Iterator[Diagnostic]:
    known = {id(one.tensor) for name, one in tensors.items() if name in stored}
    missing = [
        name
        for name, one in tensors.items()
        if name not in stored and id(one.tensor) not in known and one.tensor.numel()
    ]  # what has no numbers is not written
    extra = [name for name in stored if name not in tensors]
    if missing or extra:
        parts = [f"has no {_some(missing)}"] * bool(missing)
        parts += [f"has {_some(extra)}, which the model does not have"] * bool(extra)
        help_text = "it was saved from another model: use that model, or start a new run in another folder"
        yield Diagnostic("checkpoint-mismatch", f"the checkpoint {' and '.join(parts)}", place, help_text)


def _of_tensors(
    tensors: Mapping[str, StateTensor], stored: Mapping[str, Any], place: Span
) -> Iterator[Diagnostic]:
    shapes, kinds = [], []
    for name, one in tensors.items():
        if name in stored:
            here, there, dtype = one.shape, tuple(stored[name].size), one.dtype
            if here != there:
                shapes.append(f"{name} is {list(there)}, and {list(here)} in the model")
            elif dtype != stored[name].properties.dtype:
                kinds.append((name, stored[name].properties.dtype, dtype))
    if shapes:
        more = f", and {len(shapes) - SHOWN} more" if len(shapes) > SHOWN else ""
        yield Diagnostic(
            "checkpoint-mismatch",
            f"the checkpoint is of another size: {'; '.join(shapes[:SHOWN])}{more}",
            place,
            "build the model with the sizes that it was saved with",
        )
    for old, new in sorted({(a, b) for _, a, b in kinds}, key=str):
        some = _some([name for name, a, b in kinds if (a, b) == (old, new)])
        message = f"the checkpoint holds {_called(old)} for {some}, and the model {_called(new)}"
        yield Diagnostic(
            "checkpoint-dtype",
            message,
            place,
            "no value is cast silently: build the model in the checkpoint's dtype",
        )


def _of_optimizer(
    own: Collection[str],
    kind: str,
    metadata: Metadata,
    about: Mapping[str, Any],
    place: Span,
) -> Iterator[Diagnostic]:
    """`own` are the parameters that an optimizer of the class `kind` trains."""
    code, saved = "checkpoint-optimizer", about.get("optimizer")
    if saved is None:
        help_text = "load the model alone: start from its weights"
        yield Diagnostic(code, "the checkpoint has a model and no optimizer", place, help_text)
        return
    if saved["class"] != kind:
        message = f"the checkpoint's optimizer is {saved['class']}, and this run's {kind}"
        yield Diagnostic(code, message, place, "continue with the same optimizer")
        return
    having = {
        name.removeprefix(OPTIMIZER).rpartition(".")[0]
        for name in metadata.state_dict_metadata
        if name.startswith(OPTIMIZER)
    } | set(saved["values"])
    missing = [n for n in own if n not in having and n not in saved["without_state"]]
    extra = sorted((having | set(saved["without_state"])) - set(own))
    if missing:
        message = f"the checkpoint's optimizer has never trained {_some(missing)}"
        yield Diagnostic(code, message, place, "train the same parameters as before")
    if extra:
        message = f"the checkpoint's optimizer trained {_some(extra)}, and this run does not"
        yield Diagnostic(code, message, place, "train the same parameters as before")


def _some(found: Iterable[str]) -> str:
    folded = fold_paths(list(found))
    more = f" and {len(folded) - SHOWN} more" if len(folded) > SHOWN else ""
    return ", ".join(folded[:SHOWN]) + more


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
