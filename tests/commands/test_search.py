"""What `search` says behind its tables: how the preset is saved, and how it is run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parallelizer.commands.search import _kinds, _next_steps
from parallelizer.diagnostics.diagnostic import PlanError


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_output_it_says_to_save_the_preset_before_it_is_run() -> None:
    save, run = _next_steps(None, None, ["model=llama3_8b"])
    assert save == "save it: create the folder conf/parallel and add --output conf/parallel/found.yaml"
    assert run == "then plan it: parallelizer plan --config-dir conf model=llama3_8b parallel=found"
    os.makedirs("conf/parallel")
    assert _next_steps(None, None, [])[0] == "save it: add --output conf/parallel/found.yaml"


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
