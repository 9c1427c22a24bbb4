"""Operations that may fail on some ranks, and must then fail on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.runtime.object_group import object_group
from parallelizer.runtime.state import every_group

T = TypeVar("T")


def together(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Do what may fail on some ranks only, and fail on all of them then: with PlanError where one of them raises it.

    Collective over `group` (by default over all ranks) where ranks are initialised.
    """
    value: T | None = None
    found: tuple[Diagnostic, ...] = ()
    failure: Exception | None = None
    try:
        value = action()
    except PlanError as error:
        found = error.diagnostics
    except Exception as error:  # it is raised again below, when the other ranks know
        failure = error
    told = gathered((found, None if failure is None else repr(failure)), group)
    found = tuple(diagnostic for diagnostics, _ in told for diagnostic in diagnostics)
    others = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text is not None]
    if failure is not None:
        raise failure
    if found:
        raise PlanError(found)
    if others:
        raise RuntimeError("; ".join(others))
    return value  # type: ignore[return-value]


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of each rank in order of rank, on all of them. Collective; values are pickled."""
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if ranks == 1:
        return [value]
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, value, object_group() if group is None else group)
    return everyone


def gathered_over_model(model: nn.Module, mine: T) -> list[T]:
    """What every rank of the model has, in no particular order; it must pickle. Collective over all ranks of the model."""
    everyone: list[T] = [mine]
    for group in every_group(model):
        lists = gathered(everyone, None if group is dist.group.WORLD else group)
        everyone = [one for some in lists for one in some]
    return everyone


def own_rank() -> int:
    """This rank's number in the world; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0
