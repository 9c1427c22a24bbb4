"""Whether a model fits the folder of weights that it starts from, and can be saved in the one that it goes to."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from parallelizer.hugging_face.model_tensors import model_tensors
from parallelizer.hugging_face.saving import check_savable
from parallelizer.hugging_face.weights import look_up


def check_folders(model: nn.Module, weights: Path | None, save: str | None, *, replace: bool) -> None:
    """As far as the headers of files tell, so that `model` may be on meta. Without `weights` it starts from other values,
    without `save` it is not saved, and with `replace` a model that lies there already is no hindrance. Raises PlanError.
    """
    tensors = model_tensors(model)
    pretrained = None if weights is None else look_up(tensors, weights)
    if save is not None:
        check_savable(tensors, save, pretrained, replace=replace)
