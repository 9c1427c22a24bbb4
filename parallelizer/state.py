"""What a parallel model remembers of how it was made parallel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from parallelizer.context.buffers import LocalBuffers
    from parallelizer.program import Program
    from parallelizer.styles.packing import Packing

_ATTRIBUTE = "_parallelizer_state"


@dataclass(frozen=True)
class ParallelState:
    """The program that was applied, the mesh it runs on, packed parameters by name, the model's local
    buffers, and the groups of ranks that see different tokens.
    """

    program: Program
    mesh: DeviceMesh
    packed: Mapping[str, Packing]
    buffers: LocalBuffers
    data_groups: tuple[dist.ProcessGroup, ...]


def remember(model: nn.Module, state: ParallelState) -> None:
    """Attach the state to the model, outside its parameters, buffers and modules."""
    model.__dict__[_ATTRIBUTE] = state


def state_of(model: nn.Module) -> ParallelState | None:
    """The state of a parallel model, or None for any other."""
    return model.__dict__.get(_ATTRIBUTE)


def restore_buffers(model: nn.Module) -> None:
    """Put a parallel model's whole buffers back, as they were before its last forward."""
    state = state_of(model)
    if state is not None:
        state.buffers.restore()
