"""Every test that the default run leaves out by name is there."""

from __future__ import annotations

import re

import pytest

from tests.left_out import LIST, read
from tests.test_import_order import ROOT

NAMED = read(LIST.read_text())


@pytest.mark.parametrize("file", NAMED)
def test_the_functions_are_there(file: str) -> None:
    defined = set(re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.M))
    assert {name.partition("[")[0] for name in NAMED[file]} <= defined


def test_a_name_a_case_and_a_number_are_read() -> None:
    text = "# why\na.py\n    test_one\n    test_two[x = 1\n    test_three = 2\nb.py\n    test_four = 1\n"
    found = read(text)
    assert found == {"a.py": {"test_one": 0, "test_two[x = 1": 0, "test_three": 2}, "b.py": {"test_four": 1}}
