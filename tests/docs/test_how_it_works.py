"""docs/how_it_works.md names what there is: every pass of the compiler in order, and files and folders that exist."""

from __future__ import annotations

import re

from parallelizer.compiler.compile import PASSES
from tests.docs.test_site import DOCS, ROOT, script

TEXT = (DOCS / "how_it_works.md").read_text()


def test_the_passes_are_the_compiler_s() -> None:
    table = re.findall(r"^\| `(\w+)` \|", TEXT, re.M)
    assert table == [one.__name__ for stage in PASSES for one in stage]


def test_the_diagram_is_drawn_from_its_script_and_names_the_passes() -> None:
    drawn = script(DOCS / "pictures/flow.py").drawn()
    assert (DOCS / "pictures/flow.svg").read_text() == drawn
    assert ", ".join(one.__name__ for stage in PASSES for one in stage) in drawn


def test_the_files_that_are_named_are_there() -> None:
    for name in re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", TEXT):
        assert (ROOT / "parallelizer" / name).exists() or (ROOT / name).exists(), name
