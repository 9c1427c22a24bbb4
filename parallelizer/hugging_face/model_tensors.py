"""The tensors of a transformers model as a folder of weights has to hold them, whole, whatever plan the model is under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelizer.hugging_face.architecture import is_model
from parallelizer.runtime.state import uncut
from parallelizer.runtime.state_dict import StateTensor, state_tensors
from parallelizer.torch_private import in_written_classes


@dataclass(frozen=True)
class ModelTensors:
    """`tensors` are those of the model's state dict by name. `plain` is the model in the classes that it was written with;
    None for a model that is none of transformers, of the class `kind`.
    """

    kind: str
    plain: Any | None
    tensors: Mapping[str, StateTensor]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes in the unsharded model."""
        return {name: torch.Size(one.shape) for name, one in self.tensors.items()}


def model_tensors(model: nn.Module) -> ModelTensors:
    """Those of a model on meta or not, parallel or not, also where stages of it are on other ranks."""
    transformers = is_model(model)
    tensors = state_tensors(uncut(model))
    return ModelTensors(
        type(model).__name__, in_written_classes(uncut(model)) if transformers else None, tensors
    )
