"""The numbers of a run: read, or refused where they were written."""

from __future__ import annotations

import pytest

from parallelizer.compose import compose_config
from parallelizer.diagnostics import PlanError
from recipes.settings import Settings, read_settings


def read(*overrides: str) -> Settings:
    return read_settings(*compose_config(overrides))


def test_the_shipped_numbers_are_of_use() -> None:
    settings = read()
    assert settings.steps >= 1 and settings.lr > 0 and settings.start_timeout > 0


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("train.steps=7", "steps", 7),
        ("train.eval_every=0", "eval_every", 0),
        ("train.log_every=0", "log_every", 0),
        ("optim.lr=1", "lr", 1),
        ("optim.lr=0", "lr", 0),
        ("optim.warmup=0", "warmup", 0),
        ("launch.start_timeout=0.5", "start_timeout", 0.5),
    ],
)
def test_values_of_use(override: str, field: str, value: float) -> None:
    assert getattr(read(override), field) == value


@pytest.mark.parametrize(
    "override",
    [
        *(f"train.steps={value}" for value in ("0", "-1", "2.5", "true", "null", "many")),
        "train.seed=-1",
        "train.eval_every=-1",
        "train.eval_batches=0",
        "train.log_every=x",
        *(f"optim.lr={value}" for value in ("-1", "nan", "inf", "[1]")),
        "optim.warmup=1.5",
        "optim.final_ratio=x",
        "launch.start_timeout=0",
        "launch.collective_timeout=null",
        "launch.max_cpu_ranks=0",
    ],
)
def test_values_of_no_use(override: str) -> None:
    with pytest.raises(PlanError) as caught:
        read(override)
    [found] = caught.value.diagnostics
    assert found.code == "wrong-type"
    assert found.message.startswith(override.partition("=")[0])
    assert found.span is not None and found.span.file == f"<override {override}>"
    assert found.help


def test_a_value_that_is_missing_is_said_to_be() -> None:
    with pytest.raises(PlanError) as caught:
        read("~optim.warmup")
    assert [d.message for d in caught.value.diagnostics] == ["optim.warmup is missing"]
