"""Dotted paths of before go on working: in configurations, in the records of checkpoints, and in modules of users."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallelizer.configuration import old_paths
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.old_paths import OLD, current
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.training.data.corpus import Data, build_data
from tests.recipes.runs import ROOT, SMALL, metrics, typed

NAMED = (
    "recipes.data.halves.load",
    "recipes.data.hf_dataset.load",
    "recipes.data.images.load",
    "recipes.data.stdlib.load",
    "recipes.data.text.load",
    "recipes.outcome.SweepFolder",
    "recipes.sampling_settings.check",
    "recipes.settings.check",
)
"""What the shipped configuration named."""

IMPORTED = (
    "recipes.data.Source",
    "recipes.data.build_data",
    "recipes.data.files.read_document",
    "recipes.data.fingerprint.fingerprint",
    "recipes.data.source.Baseline",
    "recipes.data.source.Source",
    "recipes.data.tokenizer.tokenizer_of",
    "recipes.data.tokenizer.Tokenizer",
)
"""What sources of users import."""


@pytest.fixture(autouse=True)
def installed() -> None:
    old_paths.install()


@pytest.mark.parametrize("path", [*NAMED, *IMPORTED])
def test_a_path_of_before_is_the_object_of_today(path: str) -> None:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert any(getattr(importlib.import_module(new), name, None) is found for new in OLD[module])


@pytest.mark.parametrize("module", OLD)
def test_every_module_of_the_table_is_there_and_has_what_is_asked_for(module: str) -> None:
    old = importlib.import_module(module)
    assert set(dir(importlib.import_module(OLD[module][0]))) <= set(dir(old))
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        _ = old.nothing


def test_only_what_is_in_the_table_is_found() -> None:
    for name in ("recipes.loop", "recipes.data.nothing", "recipes.nothing"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_the_path_of_today() -> None:
    assert current("recipes.data.text.load") == "parallelizer.training.data.text.load"
    assert current("mine.load") == "mine.load"


def test_data_and_checks_of_a_configuration_load(tmp_path: Path) -> None:
    words = ["data=text", f"data.path={ROOT / 'LICENSE'}", "data._target_=recipes.data.text.load"]
    config, origins = compose_config([*words, "checks=[recipes.settings.check]"])
    from_config(config, origins)
    assert isinstance(build_data(config.data), Data)
    config, origins = compose_config([*words, "checks=[recipes.settings.check]", "train.steps=0"])
    with pytest.raises(PlanError, match=r"train\.steps is 0"):
        from_config(config, origins)


SOURCE = """
from recipes.data.fingerprint import fingerprint
from recipes.data.source import ALL, Baseline, Source
from recipes.data import Source as Same

assert Source is Same
class Mine(Source):
    pass
"""

ALONE = f"""
import sys
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config

from_config(*compose_config(["checks=[recipes.settings.check]"]))
exec({SOURCE!r})
print("imported")
"""


def alone(code: str, folder: Path) -> str:
    """What a program prints that knows the package as it is installed, in a folder without recipes."""
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60)
    return ran.stdout + ran.stderr


def test_where_there_are_no_recipes_they_are_found_too(tmp_path: Path) -> None:
    assert alone(ALONE, tmp_path) == "imported\n"


def test_a_file_of_the_user_s_own_recipes_is_found_before(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "settings.py").write_text("def check(reading): print('mine')\n")
    assert alone(ALONE, tmp_path) == "mine\nimported\n"


@pytest.mark.ranks
def test_a_run_of_before_goes_on(tmp_path: Path) -> None:
    """Its root configuration as `parallelizer new` wrote it, and a checkpoint whose record names the old paths."""
    conf = tmp_path / "conf"
    conf.mkdir()
    text = (ROOT / "configs" / "train.yaml").read_text()
    text = text.replace("parallelizer.training.settings.check", "recipes.settings.check")
    text = text.replace("parallelizer.training.job.outcome.SweepFolder", "recipes.outcome.SweepFolder")
    assert text.count("recipes.") == 2
    (conf / "train.yaml").write_text(text)
    run = (*SMALL, "data=text", "train.checkpoint_every=2", "hydra.run.dir=a")
    old = ("--config-dir", "conf", *run, "data._target_=recipes.data.text.load")
    assert typed("-m", *old, "train.steps=0", cwd=tmp_path).status == 1
    assert not (tmp_path / "multirun").exists()  # the callback has removed it
    first = typed(*old, "train.steps=2", cwd=tmp_path)
    assert first.status == 0, first.err
    record = json.loads((tmp_path / "a/checkpoints/step_2/run.json").read_text())
    assert "recipes.data.text.load" in json.dumps(record) and "recipes.settings.check" in json.dumps(record)
    for again in (run, old):
        steps = len(metrics(tmp_path / "a")) + 2
        ended = typed(*again, f"train.steps={steps}", cwd=tmp_path)
        assert ended.status == 0, ended.err
        assert [m["step"] for m in metrics(tmp_path / "a")] == list(range(1, steps + 1))
    words = ("checkpoint=a", "max_new_tokens=2", "device=cpu")
    assert typed(*words, cwd=tmp_path, module="recipes.generate").status == 0
    other = typed(*run, f"data.path={ROOT / 'Makefile'}", "train.steps=9", cwd=tmp_path)
    assert other.status == 1 and "data.path" in other.err and "_target_" not in other.err
