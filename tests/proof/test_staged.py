"""Collectives by way of the CPU: the values that torch's own have. There is no GPU here, so that both ways begin on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelizer.proof.staged import staged
from parallelizer.runtime.replaced_collectives import COLLECTIVES
from parallelizer.torch_private import TorchDispatchMode
from tests.ranks import run_ranks


class Staged(TorchDispatchMode):
    """Puts every collective through `staged`, as the library does with those of CUDA tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d" and name in COLLECTIVES:
            return staged(name)(*args, *(kwargs or {}).values())
        return func(*args, **(kwargs or {}))


def sent() -> dict[str, list[float]]:
    mine = torch.arange(4.0) + 10 * dist.get_rank()
    found: dict[str, torch.Tensor] = {}

    def into(name: str, size: int, call: Callable[[torch.Tensor], object]) -> None:
        found[name] = torch.full((size,), float("nan"))
        call(found[name])

    found["all_reduce"] = mine.clone()
    dist.all_reduce(found["all_reduce"])
    found["broadcast"] = mine.clone()
    dist.broadcast(found["broadcast"], 1)
    into("gather", 8, lambda out: dist.all_gather_into_tensor(out, mine))
    into("scatter", 2, lambda out: dist.reduce_scatter_tensor(out, mine.clone()))
    into("exchange", 4, lambda out: dist.all_to_all_single(out, mine))
    parts = [torch.empty(4), torch.empty(4)]
    dist.all_gather(parts, mine)
    found["gather of a list"] = torch.cat(parts)
    peer = 1 - dist.get_rank()
    # More than a socket takes at once: both send before either receives.
    large, got = torch.full((500_000,), float(dist.get_rank())), torch.empty(500_000)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, large, peer), dist.P2POp(dist.irecv, got, peer)]
    ):
        work.wait()
    found["received"] = got[[0, -1]]
    # Both receive before either sends.
    arriving = torch.empty(4)
    work = dist.irecv(arriving, peer)
    dist.isend(mine, peer).wait()
    assert work is not None
    work.wait()
    found["received first"] = arriving
    return {name: tensor.tolist() for name, tensor in found.items()}


def both() -> tuple[Any, Any]:
    plain = sent()
    with Staged():
        return plain, sent()


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_collective_has_the_values_of_torchs_own() -> None:
    for plain, by_the_cpu in run_ranks(both, 2):
        assert plain == by_the_cpu
        assert plain["received first"] in ([0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0])
        assert plain["received"] in ([0.0, 0.0], [1.0, 1.0])
