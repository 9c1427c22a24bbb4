"""Collectives of CUDA tensors over gloo, by way of the CPU: how several ranks of a proof share one GPU.

NCCL refuses two ranks on one device, from release 2.30 on unless a variable permits it. gloo itself reads CUDA tensors in some
collectives as if they lay on the CPU. A proof wants values and no speed: each collective copies its tensors to the CPU, waits for
gloo, and copies them back; a receive does so when it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallelizer import torch_private
from parallelizer.runtime.replaced_collectives import COLLECTIVES, replace_collectives

_under_way: list[Any] = []


def stage_over_the_cpu() -> None:
    """Let the collectives of CUDA tensors in this process go by way of the CPU from now on. For good: call it only in a rank of
    a proof.
    """
    replace_collectives({name: staged(name) for name in COLLECTIVES}, "cuda")


def staged(name: str) -> Callable[..., Any]:
    """The operator of that name by way of the CPU. `send` and `recv_` return at once, so that a rank may begin either before its
    peer begins the other; a receive fills its tensor when it is waited for. All other operators return when their tensors
    have their values.
    """
    operator = getattr(torch.ops.c10d, name)

    def call(*given: Any) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def down(tensor: torch.Tensor) -> torch.Tensor:
            copies.append((tensor, tensor.to("cpu", copy=True)))
            return copies[-1][1]

        result = operator(*torch_private.tree_map_tensors(down, given))
        work = result[-1] if isinstance(result, tuple) else result
        if name == "send":
            _under_way.append((copies, work))
            return result
        opened = torch_private.opened_work(work)

        def arrive() -> None:
            opened.wait()
            for tensor, copy in copies:
                tensor.copy_(copy)

        if name == "recv_":
            late = torch_private.LateWork(arrive)
            _under_way.append(late)
            return late.boxed_here()
        arrive()
        if not isinstance(result, tuple):
            return torch_private.finished_work()
        up = {id(copy): tensor for tensor, copy in copies}
        back = torch_private.tree_map_tensors(lambda tensor: up.get(id(tensor), tensor), result[0])
        return back, torch_private.finished_work()

    return call
