"""What building a wheel needs, and what it is called."""

from __future__ import annotations

import re
import tomllib

from tests.test_import_order import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_building_needs_setuptools_and_nothing_that_brings_torch() -> None:
    assert [re.split(r"\W", line)[0] for line in PROJECT["build-system"]["requires"]] == ["setuptools"]


def test_no_page_and_no_message_installs_the_other_parallelizer_of_pypi() -> None:
    assert PROJECT["project"]["name"] == "torch-parallelizer"
    found = []
    for folder in ("docs", "parallelizer", "recipes", "README.md"):
        top = ROOT / folder
        for path in [top] if top.is_file() else top.rglob("*"):
            if path.suffix in (".md", ".py", ".yaml", ".yml"):
                found += [
                    f"{path.relative_to(ROOT)}: {line}"
                    for line in re.findall(r"pip install [^\n]*", path.read_text())
                    if re.search(r"(?<![\w/.-])parallelizer\b", line.split("`")[0])
                ]
    assert found == []
