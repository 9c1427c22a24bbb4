"""What building a wheel needs, and what it is called."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.test_import_order import ROOT
from tests.wheel.installed import build

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_building_needs_setuptools_and_nothing_that_brings_torch() -> None:
    assert [re.split(r"\W", line)[0] for line in PROJECT["build-system"]["requires"]] == ["setuptools"]


@pytest.mark.slow
def test_pip_builds_it_with_setuptools_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip does for whoever installs a clone: in an environment of its own, from a package index."""
    log = tmp_path / "pip.log"
    monkeypatch.setenv("PIP_LOG", str(log))
    assert build(tmp_path, isolated=True).suffix == ".whl"
    installed = re.findall(r"Successfully installed ([^\n]*)", log.read_text())
    assert {re.sub(r"-[\d.]+", "", names) for names in installed} == {"setuptools"}, log.read_text()


def test_no_page_and_no_message_installs_the_other_parallelizer_of_pypi() -> None:
    """Nor ours by its name there, which is not published: a page says how to install from a clone."""
    assert PROJECT["project"]["name"] == "torch-parallelizer"
    found = []
    for folder in ("docs", "parallelizer", "recipes", "README.md"):
        top = ROOT / folder
        for path in [top] if top.is_file() else top.rglob("*"):
            if path.suffix in (".md", ".py", ".yaml", ".yml"):
                found += [
                    f"{path.relative_to(ROOT)}: {line}"
                    for line in re.findall(r"pip install [^\n]*", path.read_text())
                    if re.search(r"(?<![\w/.-])(torch-)?parallelizer\b", line.split("`")[0])
                ]
    assert found == []
