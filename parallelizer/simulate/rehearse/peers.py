"""Stand-ins for the peers of one rank: each collective moves what this rank has, on this rank's device.

torch's `fake` backend makes groups of any size in one process, and its collectives leave some results unwritten: a received
tensor always, and in torch 2.11 what an all-to-all or a reduce-scatter gives. Here every result is written, in one kernel, from
the tensors of this rank: a sum is this rank's term, a gather is this rank's part as often as there are ranks, what is received is
what was sent last in the group, or small numbers where nothing was. So values are finite, shapes and bytes are those of the real
run, and nothing waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from parallelizer import torch_private
from parallelizer.runtime.replaced_collectives import replace_collectives

Tensors = list[torch.Tensor]

_sent: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()


def stand_in_for_peers(device: str) -> None:
    """Let the collectives of this process, on tensors of `device`, be stand-ins from now on. For good: call it only in a child
    that has entered a fake world.
    """
    replace_collectives(STAND_INS, device)


def _filled(out: torch.Tensor, source: torch.Tensor) -> None:
    """Write all of `out` from a tensor of any size."""
    out, source = out.view(-1), source.reshape(-1)
    if source.numel() >= out.numel():
        out.copy_(source[: out.numel()])
    elif source.numel() == 0:
        out.zero_()
    elif out.numel() % source.numel() == 0:
        out.view(-1, source.numel()).copy_(source.unsqueeze(0).expand(out.numel() // source.numel(), -1))
    else:
        out.copy_(source.repeat(-(-out.numel() // source.numel()))[: out.numel()])


def _part(whole: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's chunk of a tensor that is scattered."""
    opened = torch_private.opened_group(group)
    return whole.reshape(opened.size(), -1)[opened.rank()]


def _allreduce(tensors: Tensors, *rest: Any) -> tuple[Tensors, Any]:
    return tensors, torch_private.finished_work()


def _allreduce_coalesced(tensors: Tensors, *rest: Any) -> Any:
    return torch_private.finished_work()


def _broadcast(tensors: Tensors, *rest: Any) -> tuple[Tensors, Any]:
    return tensors, torch_private.finished_work()


def _allgather(outs: list[Tensors], ins: Tensors, *rest: Any) -> tuple[list[Tensors], Any]:
    for gathered, one in zip(outs, ins, strict=True):
        for out in gathered:
            out.copy_(one)
    return outs, torch_private.finished_work()


def _allgather_base(out: torch.Tensor, one: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, Any]:
    _filled(out, one)
    return out, torch_private.finished_work()


def _allgather_into_tensor_coalesced(outs: Tensors, ins: Tensors, *rest: Any) -> Any:
    for out, one in zip(outs, ins, strict=True):
        _filled(out, one)
    return torch_private.finished_work()


def _reduce_scatter(outs: Tensors, ins: list[Tensors], group: Any, *rest: Any) -> tuple[Tensors, Any]:
    index = torch_private.opened_group(group).rank()
    for out, whole in zip(outs, ins, strict=True):
        out.copy_(whole[index])
    return outs, torch_private.finished_work()


def _reduce_scatter_base(
    out: torch.Tensor, whole: torch.Tensor, group: Any, *rest: Any
) -> tuple[torch.Tensor, Any]:
    _filled(out, _part(whole, group))
    return out, torch_private.finished_work()


def _reduce_scatter_tensor_coalesced(outs: Tensors, ins: Tensors, group: Any, *rest: Any) -> Any:
    for out, whole in zip(outs, ins, strict=True):
        _filled(out, _part(whole, group))
    return torch_private.finished_work()


def _alltoall(outs: Tensors, ins: Tensors, *rest: Any) -> tuple[Tensors, Any]:
    for out, one in zip(outs, ins, strict=True):
        _filled(out, one)
    return outs, torch_private.finished_work()


def _alltoall_base(out: torch.Tensor, whole: torch.Tensor, *rest: Any) -> Any:
    _filled(out, whole)
    return torch_private.finished_work()


def _send(tensors: Tensors, group: Any, *rest: Any) -> Any:
    _sent[torch_private.opened_group(group).group_name] = tensors[0]
    return torch_private.finished_work()


def _recv(tensors: Tensors, group: Any, *rest: Any) -> Any:
    sent = _sent.pop(torch_private.opened_group(group).group_name, None)
    for tensor in tensors:
        if sent is not None and sent.dtype == tensor.dtype:
            _filled(tensor, sent)
        else:
            tensor.fill_(0.01 if tensor.is_floating_point() else 0)
    return torch_private.finished_work()


def _barrier(*rest: Any) -> Any:
    return torch_private.finished_work()


STAND_INS: dict[str, Callable[..., Any]] = {
    "allreduce_": _allreduce,
    "allreduce_coalesced_": _allreduce_coalesced,
    "broadcast_": _broadcast,
    "allgather_": _allgather,
    "_allgather_base_": _allgather_base,
    "allgather_into_tensor_coalesced_": _allgather_into_tensor_coalesced,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_tensor_coalesced,
    "alltoall_": _alltoall,
    "alltoall_base_": _alltoall_base,
    "send": _send,
    "recv_": _recv,
    "barrier": _barrier,
}
"""By operator of `c10d`."""
