"""Parts of a backward, and the gradients that FSDP reduces. See `parallelizer.torch_private`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """The units of FSDP in a module, itself among them, from the outside in."""
    return [one for one in module.modules() if isinstance(one, FSDPModule)]


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread: what a module computes then is computed again, for a checkpoint. Waits for
    a public name.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def reduce_gradients(units: Sequence[FSDPModule]) -> None:
    """Reduce what FSDP's units have accumulated, and free what they gathered, outside of a backward pass: gradients of
    weights alone run through none of FSDP's hooks. torch's own schedules do the same.
    """
    done = set()
    for unit in units:
        unit.set_is_last_backward(True)
        unit.set_reshard_after_backward(True, recurse=False)
        unit.set_requires_gradient_sync(True, recurse=False)
    for unit in units:
        state = unit._get_fsdp_state()
        # One group of parameters a unit until torch 2.12, several since.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            if group is not None:
                group.post_backward()
        done.add(state)
    roots = {state for state in done if state._is_root}
    for root in roots:
        root._root_post_backward_final_callback()
