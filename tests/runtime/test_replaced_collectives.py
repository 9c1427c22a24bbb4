"""The collectives that may be replaced are all that torch has, and both replacements have a kernel for each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallelizer import torch_private
from parallelizer.child.children import in_children
from parallelizer.runtime.replaced_collectives import COLLECTIVES, replace_collectives
from parallelizer.simulate.rehearse.peers import STAND_INS

UNUSED = {"gather_", "scatter_", "reduce_", "recv_any_source_", "allgather_coalesced_"}
"""Neither a step under DTensor and fsdp nor the ring calls them."""

AGREEING = {"barrier", "monitored_barrier_"}
"""They move no tensor."""


def test_every_collective_of_a_step_is_among_them() -> None:
    with_group = {
        schema.name.partition("::")[2]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("c10d::") and any("ProcessGroup" in str(a.type) for a in schema.arguments)
    }
    assert with_group - UNUSED - AGREEING == set(COLLECTIVES)


def test_a_rehearsal_has_a_stand_in_for_each() -> None:
    assert set(STAND_INS) == {*COLLECTIVES, "barrier"}


def _reduced() -> list[float]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    doubled = {
        "allreduce_": lambda tensors, *rest: (tensors[0].mul_(2), (tensors, torch_private.finished_work()))[1]
    }
    replace_collectives(doubled, "cpu")
    value = torch.ones(2)
    dist.all_reduce(value, async_op=True)
    values: list[float] = value.tolist()
    return values


def test_a_replaced_collective_runs() -> None:
    assert in_children([(_reduced,)]) == [[2.0, 2.0]]
