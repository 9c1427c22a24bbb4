"""Every test that the default run leaves out by name is there."""

from __future__ import annotations

import re

import pytest

from tests.left_out import FIRST, LEFT_OUT
from tests.test_import_order import ROOT


@pytest.mark.parametrize("file", LEFT_OUT | FIRST)
def test_the_functions_are_there(file: str) -> None:
    defined = set(re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.M))
    assert {name.partition("[")[0] for name in LEFT_OUT.get(file, ())} <= defined
    assert set(FIRST.get(file, ())) <= defined
