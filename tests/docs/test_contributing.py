"""CONTRIBUTING.md names components and files that exist, in the order that the tests check."""

from __future__ import annotations

import re

import pytest

from tests.test_import_order import APART, ORDER, ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
NAMED = sorted({
    word
    for word in re.findall(r"`([\w./<>*-]+)`", TEXT)
    if word.endswith(("/", ".py", ".md", ".yaml", ".toml")) and not re.search("[<>*]", word)
})  # fmt: skip
"""Every file and folder in backticks."""


@pytest.mark.parametrize("path", NAMED)
def test_a_file_that_it_names_is_there(path: str) -> None:
    places = [ROOT / path, ROOT / "parallelizer" / path]
    # `parse_plan.py`, `parse_rule.py`: the folder is named once.
    beside = {f"{folder}{path}" for folder in re.findall(r"`(\w[\w/]*/)\w+\.\w+`", TEXT)}
    places += [ROOT / "parallelizer" / each for each in beside]
    assert any(place.exists() for place in places), path


def test_its_order_is_the_one_that_is_held() -> None:
    written = TEXT.partition("components to its left:\n\n")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"\w+", written)) == ORDER


def test_its_table_of_components_has_every_one() -> None:
    table = TEXT.partition("| component |")[2].partition("\n\n")[0]
    components = [
        re.sub(r"\.py|/", "", name)
        for line in table.splitlines()[2:]
        for name in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]
    assert set(components) == {*ORDER, *APART}
