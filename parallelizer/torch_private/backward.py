"""Parts of a backward, and the gradients that FSDP reduces. See `parallelizer.torch_private`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """The units of FSDP in a module, itself among them, from the outside in."""
    return [one for one in module.modules() if isinstance(one, FSDPModule)]


def unsharded_gradients(units: Sequence[FSDPModule]) -> list[torch.Tensor]:
    """The gradients of whole parameters that FSDP's units keep until they are reduced. There is no public way to them."""
    found = []
    for unit in units:
        for group in parameter_groups(unit):
            for param in group.fsdp_params:
                whole = getattr(param, "_unsharded_param", None)
                found += [param.unsharded_accumulated_grad, None if whole is None else whole.grad]
    return [gradient for gradient in found if gradient is not None]


def sharded_and_whole(unit: FSDPModule) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """The parameters of a unit that were gathered before, each as the shard and as the whole that forward sees. The module has
    one of the two at a time.
    """
    found = []
    for group in parameter_groups(unit):
        for param in group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                found.append((param.sharded_param, whole))
    return found


def gather_once(units: Sequence[FSDPModule]) -> None:
    """Let FSDP's units, from the outside in, gather and free their parameters once. This makes the tensors that they gather into,
    which otherwise happens in the first forward. There is no public way to begin before that.
    """
    for unit in units:
        unit._get_fsdp_state()._lazy_init()
        unit.unshard()
        unit.reshard()


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
        for group in parameter_groups(unit):
            group.post_backward()
        done.add(unit._get_fsdp_state())
    roots = {state for state in done if state._is_root}
    for root in roots:
        root._root_post_backward_final_callback()


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """A unit's groups of parameters: one until torch 2.12, several since."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]
