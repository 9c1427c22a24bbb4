"""A warning for state dicts whose tensors only the same size of tp can read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from parallelizer.language.fold import fold_paths


def warn_of_packed(model: nn.Module, names: Sequence[str]) -> None:
    """Let the model's first `state_dict()` warn of these parameters, whose rows stand in the order of the ranks of tp: torch's
    tools see plain shards, and would load them on another number of ranks without an error.
    """
    warned = False

    def hook(module: nn.Module, *_: Any) -> None:
        nonlocal warned
        if warned:
            return
        warned = True
        warnings.warn(
            f"this state dict has {', '.join(fold_paths(names)[:3])} in the order of the ranks of tp (`packed`), so that "
            "only a run with the same size of tp can load it. parallelizer.save_checkpoint and whole_state_dict keep the "
            "model's own order",
            UserWarning,
            stacklevel=3,
        )

    model.register_state_dict_pre_hook(hook)
