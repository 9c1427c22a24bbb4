"""Which tensors of a model and its optimizer are saved, under which names, and by whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.checkpoint import contents
from parallelizer.runtime.state_dict import state_tensors
from tests.ranks import run_ranks
from tests.runtime.checkpoint.models import adamw, counting, parallel, train
from tests.runtime.pipeline import models as staged
from tests.runtime.pipeline.models import PP2, PP2_FSDP2, PP2_TP2, PP4, ZBV, Layout

MESHES: tuple[dict[str, int], ...] = (
    {"tp": 4}, {"dp_shard": 4}, {"dp_replicate": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2},
)  # fmt: skip


def test_names_without_a_group() -> None:
    model = parallel({})
    optimizer = counting(model)
    train(model, optimizer, [0])
    held = contents.held_of_model(model)
    names = {one.name.removeprefix("model.") for one in held}
    assert "after.weight" not in names and "extra.derived" not in names  # it is before.weight; not saved
    assert {"before.weight", "frozen.bias", "extra.kept", "extra.empty"} <= names
    assert all(one.writes and one.name.startswith("model.") for one in held)
    tensors = {one.name: one for one in contents.held_of_optimizer(model, optimizer)}
    assert tensors["optimizer.before.weight.mean"].local.dtype == torch.float64
    assert tensors["optimizer.before.weight.scalar"].shape == ()
    assert not any(name.endswith(".count") for name in tensors)
    about = contents.about_optimizer(model, optimizer)
    assert about["values"]["before.weight"] == {"count": 1, "decay": 0.9, "even": False}
    assert about["class"] == "Counting" and about["without_state"] == []
    assert "frozen.weight" not in contents.trained(state_tensors(model), optimizer)
    [random] = contents.held_random()
    assert random.name == "random.0.cpu" and torch.equal(random.local, torch.get_rng_state())


def test_a_parameter_that_is_not_the_models_is_nobodys() -> None:
    model, stranger = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
    assert list(contents.trained(state_tensors(model), torch.optim.SGD([*model.parameters(), stranger]))) == [
        "weight",
        "bias",
    ]


@pytest.mark.ranks
def test_every_number_is_written_by_one_rank_and_the_work_is_shared() -> None:
    def worker() -> list[Written]:
        found = []
        for sizes in MESHES:
            model = parallel(sizes)
            optimizer = adamw(model)
            train(model, optimizer, [0])
            found.append(written_of(model, optimizer))
        return found

    check_written(run_ranks(worker, 4), MESHES)


@pytest.mark.ranks
@pytest.mark.parametrize("layouts", [(PP2, ZBV), (PP4, PP2_TP2, PP2_FSDP2)], ids=str)
def test_stages_write_each_number_once_too(layouts: tuple[Layout, ...]) -> None:
    """A shared parameter by the stage that owns it, a buffer of the root by one of all ranks."""

    def worker() -> list[Written]:
        found = []
        for layout in layouts:
            model = staged.parallel(layout, staged.tied)
            optimizer = staged.adamw(model)
            staged.train(model, optimizer, [0])
            found.append(written_of(model, optimizer))
        return found

    every = run_ranks(worker, layouts[0].ranks)
    check_written(every, layouts, share=0.04)
    whole = set(staged.Staged(tied=True).state_dict()) - {"after.weight"}
    for place in range(len(layouts)):
        names = {name for ranks in every for name in ranks[place][0] if name.startswith("model.")}
        assert names == {f"model.{name}" for name in whole}


Written = tuple[dict[str, Any], dict[str, Any]]
"""By name: the boxes that a rank writes, and the shapes of the whole tensors."""


def written_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Written:
    held = [*contents.held_of_model(model), *contents.held_of_optimizer(model, optimizer)]
    held += contents.held_random()
    boxes: dict[str, Any] = {one.name: [] for one in held}
    for one in held:
        boxes[one.name] += [(o, tuple(v.shape)) for o, v in one.boxes()] if one.writes else []
    return boxes, {one.name: one.shape for one in held}


def check_written(everyone: list[list[Written]], meshes: Sequence[Any], share: float = 0.1) -> None:
    """Each number is written by one rank, and each rank writes a share of them."""
    count_of_ranks = len(everyone)
    for place, sizes in enumerate(meshes):
        written: dict[str, torch.Tensor] = {}
        own = [0] * count_of_ranks
        for rank, ranks in enumerate(everyone):
            boxes, shapes = ranks[place]
            for name, parts in boxes.items():
                count = written.setdefault(name, torch.zeros(shapes[name], dtype=torch.int64))
                for offset, shape in parts:
                    count[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] += 1
                    own[rank] += math.prod(shape) if not name.startswith("random.") else 0
        wrong = [name for name, count in written.items() if not bool((count == 1).all())]
        assert not wrong, (sizes, wrong)
        assert min(own) > share * sum(own), (sizes, own)
        assert {f"random.{rank}.cpu" for rank in range(count_of_ranks)} <= set(written)


def test_without_a_group_there_is_rank_0() -> None:
    assert not dist.is_initialized()
    assert contents.held_random()[0].name.startswith("random.0.")


@pytest.mark.ranks
def test_a_state_that_nobody_could_deal_out_again_is_refused_when_it_is_saved() -> None:
    def worker() -> str:
        model = parallel({"dp_shard": 2})
        optimizer = adamw(model)
        train(model, optimizer, [0])
        param = optimizer.param_groups[0]["params"][0]
        optimizer.state[param]["row"] = torch.zeros(3)
        with pytest.raises(PlanError) as caught:
            contents.held_of_optimizer(model, optimizer)
        [found] = caught.value.diagnostics
        return f"{found.code}: {found.message}"

    [said, other] = run_ranks(worker, 2)
    assert said == other and said.startswith("checkpoint-optimizer: row of ") and " is [3], and " in said
