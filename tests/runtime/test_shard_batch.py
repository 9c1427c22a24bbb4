"""Rows are dealt over the data axes, tokens over cp; a batch that is not what it is taken for is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parallelizer as pz
from parallelizer.language.plan import Mesh
from tests.parity import plan
from tests.ranks import run_ranks

PLAN = '{version: 1, rules: {"": fsdp}, buffers: {batch: {input_ids: 1, labels: 1, positions: positions}}}'
ROWS, TOKENS = 8, 16


def batch() -> dict[str, torch.Tensor]:
    """Row r holds r * 100 + position, so that each number says where it comes from."""
    ids = torch.arange(ROWS).unsqueeze(1) * 100 + torch.arange(TOKENS)
    return {"input_ids": ids, "labels": ids + 1, "weight": torch.arange(ROWS), "scale": torch.tensor(2.0)}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "axes",
    [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "tp": 2}],
)
def test_all_ranks_together_have_each_token_once_for_each_rank_of_tp(axes: dict[str, int]) -> None:
    def worker() -> tuple[list[int], list[int], list[int]]:
        mesh = pz.build_mesh(Mesh(axes), "cpu")
        local = pz.shard_batch(batch(), plan(PLAN), mesh)
        assert torch.equal(local["labels"], local["input_ids"] + 1)
        assert torch.equal(local["positions"], local["input_ids"] % 100)
        assert local["scale"] == 2.0
        return local["input_ids"].flatten().tolist(), local["weight"].tolist(), [*pz.batch_rank(mesh)]

    results = run_ranks(worker, 4)
    seen = sorted(token for tokens, _, _ in results for token in tokens)
    assert seen == sorted(batch()["input_ids"].flatten().tolist() * axes.get("tp", 1))
    for _, weight, (index, ranks) in results:
        assert weight == list(range(index * ROWS // ranks, (index + 1) * ROWS // ranks))


@pytest.mark.ranks
def test_a_loader_that_deals_rows_by_itself_says_so() -> None:
    def worker() -> list[int]:
        mesh = pz.build_mesh(Mesh({"dp_shard": 2, "cp": 2}), "cpu")
        index, ranks = pz.batch_rank(mesh)
        own = {n: t.chunk(ranks)[index] if t.ndim else t for n, t in batch().items()}
        dealt = pz.shard_batch(batch(), plan(PLAN), mesh)
        read = pz.shard_batch(own, plan(PLAN), mesh, rows="local")
        assert all(torch.equal(read[name], dealt[name]) for name in dealt)
        return read["weight"].tolist()

    assert run_ranks(worker, 4) == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("axes", "rows", "message"),
    [
        ({"dp_shard": 4}, "global", r"ranks of dp_shard have .*labels.*rows=\"local\""),
        ({"dp_shard": 2, "tp": 2}, "global", r"ranks of tp have .*batch_rank"),
        ({"dp_shard": 2, "tp": 2}, "local", r"ranks of tp have .*batch_rank"),
        ({"dp_shard": 2, "cp": 2}, "local", r"ranks of cp have .*batch_rank"),
    ],
)
def test_ranks_with_other_batches_are_refused_on_every_rank(
    axes: dict[str, int], rows: str, message: str
) -> None:
    def worker() -> None:
        mesh = pz.build_mesh(Mesh(axes), "cpu")
        mine = {n: t + (dist.get_rank() if n == "labels" else 0) for n, t in batch().items()}
        with pytest.raises(ValueError, match=message):
            pz.shard_batch(mine, plan(PLAN), mesh, rows=rows)  # type: ignore[arg-type]

    run_ranks(worker, 4)


@pytest.mark.ranks
def test_one_rank_that_differs_stops_those_that_agree_among_themselves() -> None:
    def worker() -> None:
        mesh = pz.build_mesh(Mesh({"dp_shard": 2, "tp": 2}), "cpu")
        mine = batch() if dist.get_rank() != 3 else {**batch(), "more": torch.ones(ROWS)}
        with pytest.raises(ValueError, match="have different"):
            pz.shard_batch(mine, plan(PLAN), mesh)

    run_ranks(worker, 4)


@pytest.mark.ranks
def test_rows_that_cannot_be_dealt_are_refused() -> None:
    def worker() -> None:
        mesh = pz.build_mesh(Mesh({"dp_shard": 2}), "cpu")
        ids = batch()["input_ids"]
        with pytest.raises(ValueError, match="3 rows does not divide over 2 data ranks"):
            pz.shard_batch({"input_ids": ids[:3]}, plan(PLAN), mesh)
        with pytest.raises(ValueError, match="input_ids has 8, weight has 4"):
            pz.shard_batch({"input_ids": ids, "weight": torch.ones(4)}, plan(PLAN), mesh)
        with pytest.raises(ValueError, match="it is 'global'"):
            pz.shard_batch({"input_ids": ids}, plan(PLAN), mesh, rows="some")  # type: ignore[arg-type]
        # One row for all, a table of biases for instance, stays.
        local = pz.shard_batch({"input_ids": ids, "bias": torch.ones(1, TOKENS)}, plan(PLAN), mesh)
        assert local["bias"].shape == (1, TOKENS)

    run_ranks(worker, 2)


def test_without_a_mesh_all_rows_stay() -> None:
    assert torch.equal(pz.shard_batch(batch(), plan(PLAN), None)["input_ids"], batch()["input_ids"])


@pytest.mark.ranks
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}])
def test_an_unknown_entry_in_place_of_a_split_one_is_named_on_every_mesh(axes: dict[str, int]) -> None:
    said = "the plan splits input_ids, which the batch lacks; it has tokens, weight, scale"

    def worker() -> None:
        mesh = pz.build_mesh(Mesh(axes), "cpu")
        renamed = {"tokens" if name == "input_ids" else name: t for name, t in batch().items()}
        if "cp" in axes:
            with pytest.raises(ValueError, match=said):
                pz.shard_batch(renamed, plan(PLAN), mesh)
        else:
            with pytest.warns(UserWarning, match=f"{said}.*with cp it is an error"):
                pz.shard_batch(renamed, plan(PLAN), mesh)

    run_ranks(worker, 2)


def test_an_unknown_entry_in_place_of_a_split_one_is_named_without_a_mesh() -> None:
    renamed = {"tokens": batch()["input_ids"], "labels": batch()["labels"]}
    with pytest.warns(UserWarning, match="it has tokens"):
        pz.shard_batch(renamed, plan(PLAN), None)
