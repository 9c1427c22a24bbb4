"""The wheel with what it says that it needs, and nothing else: installed by pip from a package index."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wheel.installed import ROOT, Installed, build, without_path

pytestmark = pytest.mark.slow  # a minute, and a network; `.ci/run` runs it


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("fresh")
    wheel = build(folder)
    subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
    python = folder / "environment" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, wheel], env=without_path(), check=True)
    return Installed(wheel, python)


def test_there_are_as_many_packages_as_the_readme_says(fresh: Installed) -> None:
    _, out = fresh.run("python", "-m", "pip", "list", "--format=freeze", "--exclude", "pip", cwd=ROOT)
    told = re.search(r"`make train` installs (\d+) packages", (ROOT / "README.md").read_text())
    # Our dependencies' own dependencies are not pinned.
    assert told is not None and abs(out.count("==") - int(told[1])) <= 2, out


@pytest.mark.ranks
def test_what_it_depends_on_is_enough(fresh: Installed, tmp_path: Path) -> None:
    for words in (
        ["new", "."],
        ["validate", "--config-dir", "conf", "parallel=fsdp2_tp2"],
        ["plan", "model=llama3_8b", "parallel=fsdp8_tp8"],
        ["verify", "--config-dir", "conf", "parallel=tp2", "model.layers=1"],
    ):
        status, out = fresh.run("parallelizer", *words, cwd=tmp_path)
        assert status == 0, out
    small = ["train.steps=2", "train.batch_size=4", "train.seq_len=64", "train.eval_batches=1"]
    status, out = fresh.run("python", "-m", "recipes.train", "parallel=fsdp2_tp2", *small, cwd=tmp_path)
    assert status == 0 and "trained 2 steps" in out, out
    assert "Warning" not in out


def test_a_model_of_an_extra_that_is_not_there_is_told_with_what_to_install(
    fresh: Installed, tmp_path: Path
) -> None:
    status, out = fresh.run("parallelizer", "validate", "model=hf_llama", cwd=tmp_path)
    told = " ".join(out.split())
    assert status == 1 and "pip install 'path/to/parallelizer[hf]'" in told and "Traceback" not in out, out
