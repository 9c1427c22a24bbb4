"""What all ranks of a model tell each other."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from parallelizer.state import every_group

T = TypeVar("T")


def gathered(model: nn.Module, mine: T) -> list[T]:
    """What every rank of the model has, in no particular order; it must pickle. Collective over all ranks of the model."""
    everyone: list[T] = [mine]
    for group in every_group(model):
        lists: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, everyone, group=group)
        everyone = [one for some in lists for one in some]
    return everyone


def own_rank() -> int:
    """This rank's number in the world; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0
