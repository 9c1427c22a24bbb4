"""The key `pipeline` of a preset, from files and from the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.pipeline.actions import order_text
from parallelizer.language.pipeline.settings import Pipeline, order_of
from parallelizer.language.schema.preset_keys import PIPELINE_KEYS
from tests.language.pipeline.torch_orders import torch_order


def read(*overrides: str, folder: Path | None = None) -> Setup:
    return from_overrides(
        [f"parallel.{o}" if o.startswith(("mesh.", "pipeline")) else o for o in overrides],
        config_dir=str(folder) if folder else None,
    )


def settings(*overrides: str) -> Pipeline:
    pipeline = read(*overrides).pipeline
    assert pipeline is not None
    return pipeline


def mistakes(*overrides: str, folder: Path | None = None) -> list[Diagnostic]:
    with pytest.raises(PlanError) as caught:
        read(*overrides, folder=folder)
    return list(caught.value.diagnostics)


def test_the_base_preset_has_every_key_with_its_default() -> None:
    base = yaml.safe_load((config_folder() / "parallel/base.yaml").read_text())
    assert base["pipeline"] == {key: getattr(Pipeline(), key) for key in PIPELINE_KEYS}


def test_without_pp_there_is_no_pipeline() -> None:
    setup = read("parallel=tp2")
    assert setup.pipeline is None and setup.warnings == ()


def test_numbers_are_filled_in_and_each_key_can_be_set() -> None:
    assert settings("mesh.pp=2") == Pipeline("1f1b", 4, 1)
    assert settings("mesh.pp=2", "pipeline.schedule=zbv") == Pipeline("zbv", 4, 2)
    assert settings("mesh.pp=-1", "world_size=4") == Pipeline("1f1b", 8, 1)
    set_all = settings(
        "mesh.pp=2",
        "pipeline={schedule: interleaved-1f1b, microbatches: 8, stages_per_rank: 3, balance: [1, 2, 3, 3, 2, 1]}",
    )
    assert set_all == Pipeline("interleaved-1f1b", 8, 3, (1, 2, 3, 3, 2, 1))
    assert set_all.spans["microbatches"].file.startswith("<override")


def test_a_preset_of_a_users_own_sets_it_and_the_place_is_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "parallel").mkdir()
    preset = tmp_path / "parallel/mine.yaml"
    preset.write_text("defaults: [base]\nmesh: {pp: 2}\npipeline: {schedule: zbv, balance: time}\n")
    assert read("parallel=mine", folder=tmp_path).pipeline == Pipeline("zbv", 4, 2, "time")
    preset.write_text("defaults: [base]\nmesh: {pp: 2}\npipeline:\n  schedule: zbw\n  balanse: time\n")
    found = {one.code: one for one in mistakes("parallel=mine", folder=tmp_path)}
    assert {code: str(one.span)[-len("mine.yaml:4:13") :] for code, one in found.items()} == {
        "unknown-schedule": "mine.yaml:4:13",
        "unknown-key": "/mine.yaml:5:3",
    }
    assert "did you mean zbv?" in str(found["unknown-schedule"].help)
    assert "did you mean balance?" in str(found["unknown-key"].help)
    for text in ("mesh: {pp: 2}\n", "mesh: {pp: 2}\npipeline: null\n"):
        preset.write_text(text)
        assert read("parallel=mine", folder=tmp_path).pipeline == Pipeline("1f1b", 4, 1)


@pytest.mark.parametrize(
    ("overrides", "code", "message", "help_text"),
    [
        (["pipeline.schedule=intrleaved-1f1b"], "unknown-schedule", "no schedule 'intrleaved-1f1b'", "mean interleaved-1f1b?"),
        (["pipeline.schedule=a.csv"], "unknown-schedule", "no schedule 'a.csv'", "parallel.pipeline.csv=a.csv"),
        (["pipeline.schedule=[zbv]"], "unknown-schedule", "no schedule \"['zbv']\"", "there are gpipe"),
        (["pipeline.microbatches=0"], "wrong-type", "microbatches is 0", "a whole number from 1"),
        (["pipeline.microbatches=true"], "wrong-type", "microbatches is True", "a whole number from 1"),
        (["pipeline.stages_per_rank=two"], "wrong-type", "stages_per_rank is 'two'", "a whole number from 1"),
        (["pipeline.balance=layer"], "unknown-value", "no balance 'layer'", "did you mean layers?"),
        (["pipeline.balance=[1,0]"], "wrong-type", "balance gives a stage '0' layers", "at least 1"),
        (["pipeline.balance={a: 1}"], "unknown-value", "no balance", "a list of numbers of layers"),
        (["pipeline.balance=[]"], "wrong-type", "balance is an empty list", "at least 1"),
        (["pipeline.balance=[1,2]"], "pipeline-numbers", "2 numbers of layers, but there are 4 stages", "write 4 numbers"),
        (["pipeline.csv=[a]"], "wrong-type", "csv is", "the path of a file"),
        (["pipeline.csv=a.csv"], "schedule-file", "no schedule file 'a.csv'", "looked in"),
        (["pipeline=zbv"], "wrong-type", "pipeline", "value"),
        (["pipeline.schedule=zbv", "pipeline.csv=a.csv"], "two-schedules", "both set the schedule", "remove one"),
        (["pipeline.stages_per_rank=2"], "pipeline-numbers", "1f1b takes 1 stage a rank, not 2", "set stages_per_rank to 1"),
        (
            ["pipeline.schedule=interleaved-1f1b", "pipeline.microbatches=10", "mesh.pp=4", "train.batch_size=20"],
            None, "", "",
        ),
        (
            ["pipeline.schedule=interleaved-zero-bubble", "pipeline.microbatches=9", "train.batch_size=18"],
            "pipeline-numbers", "cannot divide 9 microbatches into 2 equal rounds", "to 8 or 10",
        ),
        (
            ["pipeline.schedule=dualpipev", "pipeline.microbatches=4"],
            "pipeline-numbers", "takes 8 microbatches or more, not 4", "set microbatches to 8 or more",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_at_its_value(
    overrides: list[str], code: str | None, message: str, help_text: str
) -> None:
    if code is None:
        assert read("mesh.pp=4", *overrides).pipeline is not None
        return
    [found] = mistakes("mesh.pp=4", *overrides)
    assert found.code == code
    assert message in found.message and help_text in str(found.help), found
    assert found.span is not None and "pipeline" in found.span.file


def test_settings_that_have_no_effect_are_a_note_and_are_still_read() -> None:
    [note] = read("pipeline.schedule=zbv", "pipeline.microbatches=7").warnings
    assert (note.code, note.severity) == ("pipeline-without-pp", "note")
    assert "sets schedule and microbatches, but the axis pp is 1" in note.message
    assert [one.code for one in mistakes("pipeline.schedule=zbw")] == ["unknown-schedule"]


def test_the_rows_of_a_data_rank_and_of_an_accumulated_part_are_divided() -> None:
    assert settings("mesh.pp=2", "mesh.dp_shard=2", "train.accumulate=2").microbatches == 4
    [found] = mistakes("mesh.pp=2", "mesh.dp_shard=2", "train.accumulate=2", "train.batch_size=24")
    assert found.code == "microbatches-do-not-divide"
    assert (
        "the 6 rows of the 24 that a data rank has at a time" in found.message
        and "the default" in found.message
    )
    assert found.help == "set parallel.pipeline.microbatches to 3 or 6, or set train.batch_size to 16 or 32"
    for batch in (16, 32):
        settings("mesh.pp=2", "mesh.dp_shard=2", "train.accumulate=2", f"train.batch_size={batch}")
    for count in (3, 6):
        settings(
            "mesh.pp=2",
            "mesh.dp_shard=2",
            "train.accumulate=2",
            "train.batch_size=24",
            f"pipeline.microbatches={count}",
        )


def test_the_numbers_that_are_proposed_fit_the_schedule_too() -> None:
    [found] = mistakes(
        "mesh.pp=4", "pipeline.schedule=dualpipev", "pipeline.microbatches=11", "train.batch_size=24"
    )
    assert found.code == "microbatches-do-not-divide"
    assert str(found.help).startswith("set parallel.pipeline.microbatches to 8 or 12, ")


def test_rows_that_the_data_ranks_cannot_share_are_left_to_the_check_of_the_batch() -> None:
    assert settings("mesh.pp=2", "mesh.dp_shard=3", "train.batch_size=16").microbatches == 4


def test_a_file_sets_the_order_and_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = torch_order("dualpipev", 2, 2, 4)
    (tmp_path / "mine.csv").write_text(order_text(order))
    found = read("mesh.pp=2", "pipeline.csv=mine.csv", folder=tmp_path).pipeline
    assert found is not None and replace(found, order=None) == Pipeline("1f1b", 4, 2, csv="mine.csv")
    assert order_of(found, 2) == order
    monkeypatch.chdir(tmp_path)
    assert settings("mesh.pp=2", "pipeline.csv=./mine.csv").order == order
    assert (
        settings("mesh.pp=2", f"pipeline.csv={tmp_path}/mine.csv", "pipeline.microbatches=4").order == order
    )
    found_wrong = mistakes("mesh.pp=4", "pipeline.csv=mine.csv", "pipeline.microbatches=8")
    assert sorted((one.code, one.message) for one in found_wrong) == [
        ("pipeline-numbers", "microbatches is 8, but mine.csv has 4"),
        ("pipeline-numbers", "mine.csv has 2 rows, one for each rank, but pp is 4"),
    ]
    [rows] = mistakes("mesh.pp=2", "pipeline.csv=mine.csv", "train.batch_size=6")
    assert rows.code == "microbatches-do-not-divide" and rows.help == "set train.batch_size to 4 or 8"


def test_a_mistake_in_a_file_is_reported_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1F0,1X0\n")
    [found] = mistakes("mesh.pp=2", "pipeline.csv=mine.csv")
    assert (found.code, str(found.span)) == ("schedule-file", "mine.csv:2:5")
