"""An id without a row in an embedding, said with the embedding and the batch entry that has it.

Nothing is read back from a device for it: on a CPU, the lookup has failed already when the ids are looked at. On a GPU, the
kernel's own assertion is what is reported.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError


def unknown_id(error: IndexError, model: nn.Module, batch: Any) -> PlanError | None:
    """PlanError `data-mismatch` where the forward of an `nn.Embedding` of the model failed with `error` for an id that it has no
    row for; None for any other error.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, ids = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(module, nn.Embedding) and isinstance(ids, torch.Tensor):
            path = next((path for path, one in model.named_modules() if one is module), "")
            rows = module.num_embeddings
            value = next(_outside(ids, rows), None)
            if value is not None:
                return _mismatch(path, rows, value, batch)
    return None


def _outside(ids: torch.Tensor, rows: int) -> Iterator[int]:
    ids = ids.to_local() if isinstance(ids, DTensor) else ids
    if ids.device.type == "cpu":
        yield from ids[(ids < 0) | (ids >= rows)].tolist()


def _mismatch(path: str, rows: int, value: int, batch: Any) -> PlanError:
    entries = (
        name
        for name, entry in (batch.items() if hasattr(batch, "items") else ())
        if isinstance(entry, torch.Tensor) and not entry.is_floating_point() and bool((entry == value).any())
    )
    name = next(entries, None)
    embedding = f"the embedding {path}" if path else "the embedding"
    if name is None:
        message = f"{embedding} has {rows:,} rows, and is given the id {value:,}"
    else:
        message = f"the batch's {name!r} has the id {value:,}, and {embedding} has {rows:,} rows"
    help_text = (
        f"ids are numbers from 0 to {rows - 1:,}: correct the data, or build the model with more rows (its vocabulary, or the "
        "longest sequence, if these are positions)"
    )
    return PlanError([Diagnostic("data-mismatch", message, help=help_text)])
