"""The numbers of a run: read, or refused where they were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.training.settings import OPTIMIZER, ROOT_KEYS, SECTIONS, Settings, read_settings


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
        "train.seed=9223372036854775808",
        "train.eval_every=-1",
        "train.eval_batches=0",
        "train.check_every=-1",
        "train.on_nonfinite=warn",
        "train.on_drift=true",
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


def found(*overrides: str) -> tuple[Diagnostic, ...]:
    """What every command finds in the configuration, before it builds a model."""
    try:
        from_config(*compose_config(overrides))
    except PlanError as error:
        return error.diagnostics
    return ()


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("train.steps=-1", "wrong-type"),
        ("train.seed=x", "wrong-type"),
        ("train.clip=-1", "wrong-type"),
        ("train.accumulate=0", "wrong-type"),
        ("optim.lr=abc", "wrong-type"),
        ("launch.max_cpu_ranks=0", "wrong-type"),
    ],
)
def test_the_commands_refuse_the_numbers_too(override: str, code: str) -> None:
    [one] = found(override)
    assert one.code == code and one.span is not None and one.span.file == f"<override {override}>"


@pytest.mark.parametrize(
    ("override", "marked", "meant"),
    [
        ("+trian.steps=3", "trian", "did you mean train?"),
        ("+trian={steps: 3}", "trian", "did you mean train?"),
        ("++train.step=3", "step", "did you mean steps?"),
        ("+train.width=3", "width", "train has"),
        ("+launch.start_timout=3", "start_timout", "did you mean start_timeout?"),
        ("+optim.beta=[0.9]", "beta", "did you mean betas?"),
    ],
)
def test_keys_that_nobody_reads(override: str, marked: str, meant: str) -> None:
    [one] = found(override)
    assert one.code == "unknown-key" and one.help is not None and meant in one.help
    assert one.span is not None and one.span.file == f"<override {override}>"
    assert override[one.span.column - 1 : one.span.end_column - 1] == marked


@pytest.mark.parametrize(
    "overrides",
    [
        ("+width=512", "model.hidden_dim=${width}"),
        ("+train.half=128", "train.seq_len=${train.half}"),
        ("optim._target_=torch.optim.AdamW", "+optim.foreach=true"),
        ("+model.tie_embeddings=true",),
        ("checks=[]", "+trian.steps=3", "train.steps=-1"),
        ("checks=[not_installed.check]",),
        ("checks=null",),
    ],
)
def test_keys_that_somebody_may_read(overrides: tuple[str, ...]) -> None:
    assert found(*overrides) == ()


def test_an_unknown_key_of_a_file_is_found_there(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("defaults: [train, _self_]\nwidth: 3\ntrain:\n  stpes: 3\n")
    with pytest.raises(PlanError) as caught:
        from_config(*compose_config((), str(tmp_path), "ours"))
    [one] = caught.value.diagnostics
    assert one.code == "unknown-key" and str(one.span).endswith("ours.yaml:4:3")


def test_the_keys_are_those_of_the_shipped_configuration() -> None:
    config, _ = compose_config(())
    assert set(map(str, config)) == set(ROOT_KEYS)
    for section, known in SECTIONS.items():
        assert set(map(str, config[section])) == set(known)
    assert config.optim._target_ == OPTIMIZER
