"""The architecture of a model of transformers, without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallelizer.hugging_face.architecture import TARGET, model_type, why_no_plan

HUB = "nobody/a-model"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of a hub id in an own cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    of_model = tmp_path / "models--nobody--a-model"
    (of_model / "refs").mkdir(parents=True)
    (of_model / "refs" / "main").write_text("abc")
    snapshot = of_model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    return snapshot


def test_the_type_of_a_hub_id_is_that_of_its_copy_in_the_cache(cache: Path) -> None:
    assert model_type({"name": HUB}) is None
    (cache / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert model_type({"name": HUB}) == "qwen3"
    assert model_type({"name": f"./{HUB}"}) is None  # a folder, which is not there


def test_a_hub_id_that_is_not_here_is_told_how_to_get_here(cache: Path) -> None:
    told = why_no_plan({"_target_": TARGET, "name": HUB})
    assert told is not None and told.code == "plan-not-found"
    assert f"hf download {HUB} config.json" in told.help and told.key == "model.name"


def test_a_folder_whose_configuration_names_no_type_is_not_to_be_downloaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    told = why_no_plan({"_target_": TARGET, "name": str(tmp_path)})
    assert told is not None and "no readable model_type" in told.message and "download" not in told.help


@pytest.mark.parametrize("name", ["a b/c", "x/y/z", ""])
def test_a_name_that_no_repository_has_is_no_crash(name: str) -> None:
    assert model_type({"name": name}) is None
