"""A checkpoint's learning rates reach the right parameters, however they are grouped, and hold from the first step on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.hugging_face.schedule import GROUPS, load_schedule, save_schedule
from tests.hugging_face.test_trainer import losses, trainer_of
from tests.ranks import run_ranks

RATES = {"0.weight": 0.4, "0.bias": 0.2, "1.weight": 0.4, "1.bias": 0.2}


class Warmup:
    """A function with values of its own, which a scheduler's state has."""

    def __call__(self, step: int) -> float:
        return (step + 1) / 4


KINDS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, Warmup()),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, min_lr=0.01),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer, 0.5), LinearLR(optimizer, 0.5)], [1]
    ),
}


def grouped(model: nn.Module, *groups: tuple[str, ...], kind: str) -> tuple[SGD, Any]:
    """An optimizer with these groups of names, whose learning rates are those of `RATES`, and its scheduler."""
    named = dict(model.named_parameters())
    optimizer = SGD([{"params": [named[n] for n in names], "lr": RATES[names[0]]} for names in groups])
    return optimizer, KINDS[kind](optimizer)


def stepped(optimizer: SGD, scheduler: Any, times: int) -> None:
    for step in range(times):
        optimizer.step()
        scheduler.step(float(step)) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()


def rates(model: nn.Module, optimizer: SGD) -> dict[str, float]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


TWO = (("0.weight", "1.weight"), ("0.bias", "1.bias"))
FOUR = (("1.bias",), ("0.bias",), ("0.weight",), ("1.weight",))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before, after", [(TWO, FOUR), (FOUR, TWO), (TWO, TWO)])
def test_each_parameter_goes_on_with_its_learning_rate(
    kind: str, before: Any, after: Any, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first = grouped(model, *before, kind=kind)
    stepped(*first, 2)
    save_schedule(tmp_path, first[1], model, first[0])
    second = grouped(model, *after, kind=kind)
    load_schedule(tmp_path, second[1], model, second[0])
    assert rates(model, second[0]) == rates(model, first[0])
    stepped(*first, 1)
    stepped(*second, 1)
    assert rates(model, second[0]) == pytest.approx(rates(model, first[0]))


def test_a_group_of_parameters_with_different_learning_rates_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first = grouped(model, *TWO, kind="lambda")
    save_schedule(tmp_path, first[1], model, first[0])
    second = grouped(model, ("0.weight", "1.weight", "0.bias", "1.bias"), kind="lambda")
    with pytest.raises(PlanError, match=r"checkpoint-optimizer.* of 0\.weight"):
        load_schedule(tmp_path, second[1], model, second[0])


def test_a_checkpoint_without_names_loads_into_as_many_groups(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first = grouped(model, *TWO, kind="lambda")
    stepped(*first, 1)
    save_schedule(tmp_path, first[1], model, first[0])
    (tmp_path / GROUPS).unlink()
    second = grouped(model, *TWO, kind="lambda")
    load_schedule(tmp_path, second[1], model, second[0])
    assert rates(model, second[0]) == rates(model, first[0])


PLAN = """
version: 1
rules:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
"""
"""Under tp, parameters without a rule stay plain tensors, which are in groups of their own."""


@pytest.mark.ranks
def test_the_trainer_goes_on_where_parameters_are_in_fewer_groups(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)

    def worker(axes: dict[str, int], **more: Any) -> tuple[list[float], int]:
        trainer = trainer_of(axes, tmp_path, str(plan), warmup_steps=3)
        trainer.train(**more)
        return losses(trainer), len(trainer.optimizer.param_groups)

    whole, groups = run_ranks(worker, 2, {"tp": 2}, timeout=120)[0]
    resumed = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    went_on, fewer = run_ranks(lambda: worker({}, **resumed), 1, timeout=120)[0]
    assert fewer < groups
    assert went_on == pytest.approx(whole, rel=1e-5)
