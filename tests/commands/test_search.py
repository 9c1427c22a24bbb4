"""What `search` says behind its tables: how the preset is saved, and how it is run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parallelizer.commands.main import main
from parallelizer.commands.search import _bytes, _kinds, _next_steps, _sized
from parallelizer.diagnostics.diagnostic import PlanError


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_output_it_says_to_save_the_preset_before_it_is_run() -> None:
    save, run = _next_steps(None, None, ["model=llama3_8b"])
    file = "conf/parallel/found.yaml"
    put = f"put the preset above into {file}, or search again with --output {file}"
    assert save == f"save it: create the folder conf/parallel and {put}"
    assert run == "then plan it: parallelizer plan --config-dir conf model=llama3_8b parallel=found"
    os.makedirs("conf/parallel")
    assert _next_steps(None, None, [])[0] == f"save it: {put}"


def test_a_saved_preset_is_run_from_the_folder_that_it_lies_in() -> None:
    [run] = _next_steps("mine/parallel/best.yaml", None, ["train.accumulate=2"])
    assert run == "plan it: parallelizer plan --config-dir mine train.accumulate=2 parallel=best"


@pytest.mark.parametrize(
    ("output", "config_dir"), [("best.yaml", None), ("other/parallel/best.yaml", "mine")]
)
def test_a_preset_outside_of_the_configuration_is_to_be_moved(output: str, config_dir: str | None) -> None:
    own = config_dir or "conf"
    move, run = _next_steps(output, config_dir, [])
    assert move == f"to use it, move it to {own}/parallel/best.yaml"
    assert run == f"then plan it: parallelizer plan --config-dir {own} parallel=best"


def test_each_kind_of_hardware_has_its_price() -> None:
    words = ["gpus=8", "hardware=h100,h200", "++hardware.price_per_hour=2.5,3.5"]
    assert _kinds(words, several=True) == [
        ["gpus=8", "hardware=h100", "++hardware.price_per_hour=2.5"],
        ["gpus=8", "hardware=h200", "++hardware.price_per_hour=3.5"],
    ]
    one = ["hardware=h100,h200", "++hardware.price_per_hour=2"]
    assert [words[1] for words in _kinds(one, several=True)] == ["++hardware.price_per_hour=2"] * 2
    assert _kinds(["hardware=h100"], several=False) == [["hardware=h100"]]
    with pytest.raises(PlanError, match="only a search for the least cost compares"):
        _kinds(words, several=False)
    with pytest.raises(PlanError) as raised:
        _kinds(["hardware=h100,h200,b200", "++hardware.price_per_hour=2,3"], several=True)
    assert raised.value.diagnostics[0].code == "search-price"


@pytest.mark.parametrize(
    ("count", "said"), [(32 * 2**20, "32MiB"), (72 * 2**30, "72GiB"), (80 * 10**9, "80GB"), (12345, "12345B")]
)
def test_memory_is_repeated_as_the_option_takes_it(count: int, said: str) -> None:
    assert _sized(count) == said and _bytes(said) == count


def test_an_existing_preset_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("found.yaml").write_text("mine")
    assert main(["search", "model=llama_debug", "gpus=2", "hardware=h100", "--output", "found.yaml"]) == 1
    told = capsys.readouterr().err
    assert "found.yaml exists already" in told and "--force" in told
    assert Path("found.yaml").read_text() == "mine"
