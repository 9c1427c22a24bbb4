"""What a run that goes on says of what differs from its checkpoint."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from parallelizer.configuration.compose import compose_config
from parallelizer.training.keep.changes import MOST, told


def record(*overrides: str, text: str = "rules: {}") -> dict[str, Any]:
    config, _ = compose_config(overrides)
    files = {"/somewhere/plans/llama.yaml": text}
    return {"config": OmegaConf.to_yaml(config), "plan": {"name": "llama", "files": files}}


def test_more_steps_are_told_because_the_learning_rate_is_another_from_then_on() -> None:
    line = told(record("train.steps=60"), record("train.steps=900"))
    assert (
        line
        == "changed since the checkpoint: train.steps 60 -> 900 (over which the learning rate is scheduled)"
    )


def test_nothing_is_said_of_the_same_run_with_other_habits() -> None:
    other = record("train.checkpoint_every=7", "train.log_every=5", "train.profile=3:5")
    assert told(record(), other) is None


def test_each_value_is_told_with_what_it_was() -> None:
    line = told(
        record("parallel=tp2"), record("parallel=fsdp2_tp2", "optim.lr=0.001", "train.dtype=bfloat16")
    )
    assert line is not None and line.startswith("changed since the checkpoint: ")
    assert "mesh tp=2 -> dp_shard=2 x tp=2" in line
    assert "train.dtype auto -> bfloat16" in line and "-> 0.001" in line


def test_another_plan_and_another_text_of_the_same_plan() -> None:
    assert told(record(), record("plan=llama_tp")) == "changed since the checkpoint: plan llama -> llama_tp"
    assert (
        told(record(), record(text="rules: {a: colwise}"))
        == "changed since the checkpoint: the text of llama.yaml"
    )


def test_not_more_is_named_than_fits_a_line() -> None:
    changed = [
        f"optim.{key}={value}" for key, value in {"lr": 9, "warmup": 9, "eps": 9, "weight_decay": 9}.items()
    ]
    changed += ["train.dtype=bfloat16", "train.batch_size=4", "train.seq_len=8", "train.clip=9"]
    line = told(record(), record(*changed))
    assert line is not None and line.count("->") == MOST and line.endswith(", and 2 more")


def test_a_record_that_cannot_be_read_says_nothing() -> None:
    assert told({"config": "{a: ${b", "plan": {}}, {"config": "", "plan": {}}) is None
