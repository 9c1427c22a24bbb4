"""The load of experts in a step: counted on all ranks, without a wait of the host, and what is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import parallelizer as pz
from parallelizer.language.plan import Mesh
from parallelizer.simulate.rehearse.host_reads import host_reads
from parallelizer.training.watch.expert_load import ExpertLoad, ModuleLoad, StepLoad
from tests.parity import plan
from tests.ranks import run_ranks
from tests.styles.experts.models import EXPERTS, Batched, Mixture
from tests.styles.models import WIDTH

OPTIONS = "{style: experts, tokens: x, ids: chosen, weights: shares, params: {w1: shard(1), w2: shard(1)}}"
TOKENS, STEPS = 5, 3


def _loads(favourites: int) -> tuple[StepLoad, list[int], list[int], Mapping[str, int]]:
    """Of one rank: the load of the last step, the rows that its own tokens gave to each expert, the all-reduces of the load in
    every step, and the host's reads in the last one.
    """
    torch.manual_seed(1)
    model = Mixture(Batched(), rows=True, favourites=favourites)
    model.experts.reset_parameters()  # type: ignore[operator]
    mesh = Mesh({"dp_shard": 2}, ep=2)
    program = pz.compile(plan(f'rules:\n  experts: {OPTIONS}\n  "": [fsdp, checkpoint]'), model, mesh)
    pz.apply(program, model, pz.build_mesh(mesh, "cpu"))
    load, reduces = ExpertLoad(program, torch.device("cpu")), []
    reads: Mapping[str, int] = {}
    for step in range(STEPS):
        x = torch.randn(
            2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
        )
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:

            def run(x: torch.Tensor = x) -> None:
                with load.step(model):
                    model(x).sum().backward()

            reads = host_reads(run, "cpu")
        reduces.append(sum(call.args[0].dtype == torch.int64 for call in reduced.call_args_list))
    with torch.no_grad():
        weight = model.gate.weight.full_tensor()  # type: ignore[attr-defined]
        scores = x @ weight.T + 100.0 * (torch.arange(EXPERTS) < favourites) * bool(favourites)
        chosen = scores.topk(2, -1).indices.flatten()
    own = [int((chosen == number).sum()) for number in range(EXPERTS)]
    return load.read(load.summed), own, reduces, {k: n for k, n in reads.items() if "expert_load" in k}


@pytest.mark.ranks
@pytest.mark.parametrize("favourites", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_the_rows_of_all_ranks_are_counted_once_though_a_checkpoint_repeats_them(favourites: int) -> None:
    by_rank = run_ranks(_loads, 2, favourites)
    expected = [sum(rows) for rows in zip(*(own for _, own, _, _ in by_rank), strict=True)]
    for found, _, reduces, reads in by_rank:
        (module,) = found.modules.values()
        assert list(module.experts) == expected and sum(expected) == 2 * 2 * 2 * TOKENS
        assert list(module.ranks) == [sum(expected[:2]), sum(expected[2:])]
        assert reduces == [1] * STEPS  # one for each step
        assert reads == {}  # the host waits for nothing before `read`
        assert found.scalars()["experts_dropped"] == 0
    if favourites:
        assert by_rank[0][0].scalars() == {
            "experts_busiest": 2.0, "experts_busiest_rank": 2.0, "experts_dropped": 0.0
        }  # fmt: skip


UNEVEN = StepLoad({"a": ModuleLoad((3, 1), (1, 3), 2), "b": ModuleLoad((4, 4), (2, 4), 2)})


def test_what_is_made_of_a_load() -> None:
    assert UNEVEN.scalars() == {"experts_busiest": 1.5, "experts_busiest_rank": 1.5, "experts_dropped": 2.0}
    assert UNEVEN.most() is UNEVEN.modules["a"]
    assert UNEVEN.table()["b"] == {"rows": [4, 4], "rows_of_ranks": [2, 4]}
    assert UNEVEN.tracked() == {
        "experts_busiest/a": 1.5, "experts_busiest/b": 1.0, "experts_rows/expert_0": 7.0, "experts_rows/expert_1": 5.0,
        "experts_rows/rank_0": 3.0, "experts_rows/rank_1": 7.0,
    }  # fmt: skip
    assert StepLoad().scalars() == {} and StepLoad().most() is None


def test_a_rank_without_rows_has_a_share_in_the_mean() -> None:
    assert ModuleLoad((4, 0), (4, 0, 0, 0), 2).busiest_rank == 2.0  # the last two are of another stage
