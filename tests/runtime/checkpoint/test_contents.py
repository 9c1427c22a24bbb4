"""Which tensors of a model and its optimizer are saved, under which names, and by whom."""

from __future__ import annotations

import math
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

MESHES: tuple[dict[str, int], ...] = (
    {"tp": 4}, {"dp_shard": 4}, {"dp_replicate": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2},
)  # fmt: skip


def test_names_without_a_group() -> None:
    model = parallel({})
    optimizer = counting(model)
    train(model, optimizer, [0])
    held = contents.held_of_model(model)
    assert "after.weight" not in held and "extra.derived" not in held  # it is before.weight; not saved
    assert {"before.weight", "frozen.bias", "extra.kept", "extra.empty"} <= set(held)
    assert all(one.writes and one.name == f"model.{name}" for name, one in held.items())
    tensors = contents.by_name(contents.held_of_optimizer(model, optimizer))
    assert tensors["optimizer.before.weight.mean"].local.dtype == torch.float64
    assert tensors["optimizer.before.weight.scalar"].shape == ()
    assert not any(name.endswith(".count") for name in tensors)
    values = contents.values_of_optimizer(model, optimizer)
    assert values["before.weight"] == {"count": 1, "decay": 0.9, "even": False}
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
    def worker() -> list[tuple[dict[str, Any], dict[str, Any]]]:
        found = []
        for sizes in MESHES:
            model = parallel(sizes)
            optimizer = adamw(model)
            train(model, optimizer, [0])
            held = contents.by_name(contents.held_of_model(model))
            held |= contents.by_name(contents.held_of_optimizer(model, optimizer))
            held |= contents.by_name(contents.held_random())
            boxes = {
                name: [(offset, tuple(view.shape)) for offset, view in one.boxes()] if one.writes else []
                for name, one in held.items()
            }
            found.append((boxes, {name: one.shape for name, one in held.items()}))
        return found

    everyone = run_ranks(worker, 4)
    for place, sizes in enumerate(MESHES):
        written: dict[str, torch.Tensor] = {}
        own = [0] * 4
        for rank, ranks in enumerate(everyone):
            boxes, shapes = ranks[place]
            for name, parts in boxes.items():
                count = written.setdefault(name, torch.zeros(shapes[name], dtype=torch.int64))
                for offset, shape in parts:
                    count[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] += 1
                    own[rank] += math.prod(shape) if not name.startswith("random.") else 0
        wrong = [name for name, count in written.items() if not bool((count == 1).all())]
        assert not wrong, (sizes, wrong)
        assert min(own) > 0.1 * sum(own), (sizes, own)
        assert {f"random.{rank}.cpu" for rank in range(4)} <= set(written)


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
