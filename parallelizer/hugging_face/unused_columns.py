"""The columns of a dataset that Trainer drops because the model's forward does not take them, told once.

Trainer writes them to its log at a level that is off by default, and a misspelt `attention_mask` would be missing in silence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from parallelizer.diagnostics.nearest import nearest


def tell_unused(columns: Iterable[str], taken: Sequence[str], model: str, data: str) -> None:
    """Warn of the columns that are not `taken` by the model's forward."""
    dropped = [name for name in columns if name not in taken]
    if not dropped:
        return
    near = {name: found[0] for name in dropped if (found := nearest(name, taken, 1))}
    guess = "".join(f"; did you mean {other} with {name}?" for name, other in near.items())
    warnings.warn(
        f"the columns {', '.join(dropped)} of the {data} data are dropped, because the forward of {model} does not take "
        f"them{guess}",
        stacklevel=2,
    )


class TellingCollator:
    """A collator that tells at its first batch which columns the next one drops."""

    def __init__(self, collate: Callable[[Any], Any], taken: Sequence[str], model: str, data: str) -> None:
        self.collate, self.taken, self.model, self.data = collate, taken, model, data
        self.told = False

    def __call__(self, features: Any) -> Any:
        """The batch."""
        worker = get_worker_info()
        if not self.told and (worker is None or worker.id == 0):
            first = features[0] if isinstance(features, Sequence) and features else None
            if isinstance(first, Mapping):
                tell_unused(map(str, first), self.taken, self.model, self.data)
            self.told = True
        return self.collate(features)
