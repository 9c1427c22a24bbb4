"""A label that is no class, said with the name of the batch entry that has it.

Nothing is read back from a device for it: on a CPU, the cross entropy has failed already when the labels are looked at. On a
GPU, the kernel's own assertion is what is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.styles.sharded_logits import NO_COLUMN

_TORCHS = re.compile(r"Target (-?\d+) is out of bounds")


def unknown_label(error: Exception, output: Any, batch: Any) -> PlanError | None:
    """PlanError `data-mismatch` where a cross entropy failed with `error` for a label of the batch; None for any other error."""
    found = _TORCHS.search(str(error))
    if not (found or NO_COLUMN in str(error)) or not isinstance(output, torch.Tensor) or output.ndim == 0:
        return None
    classes = output.shape[-1]
    value = int(found[1]) if found else None
    entries = sorted(_wrong(batch, classes, value), key=lambda one: one[0] != "labels")
    if not entries:
        return None
    name, label = entries[0]
    message = f"the batch's {name!r} has the label {label:,}, and the model's output has {classes:,} classes"
    help_text = (
        f"labels are numbers from 0 to {classes - 1:,}, or -100 where nothing is learnt: correct the data, or build the model "
        "with more classes (its vocabulary)"
    )
    return PlanError([Diagnostic("data-mismatch", message, help=help_text)])


def _wrong(batch: Any, classes: int, value: int | None) -> Iterator[tuple[str, int]]:
    """Entries on the CPU with whole numbers that are no class, and the first such number: `value`, where that is known."""
    for name, entry in batch.items() if hasattr(batch, "items") else ():
        if isinstance(entry, torch.Tensor) and entry.device.type == "cpu" and entry.dtype == torch.int64:
            outside = (
                entry == value if value is not None else ((entry < 0) | (entry >= classes)) & (entry != -100)
            )
            if bool(outside.any()):
                yield str(name), int(entry[outside][0])
