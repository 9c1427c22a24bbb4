"""The documentation page of all codes joins their sections, as they are now."""

from __future__ import annotations

import subprocess
import sys

from parallelizer.commands.explain.page import COMMAND, page
from parallelizer.diagnostics.codes.all_codes import CODES
from parallelizer.diagnostics.package_folder import config_folder

PAGE = config_folder().parent / "docs" / "diagnostics.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), f"run: {COMMAND}"


def test_every_code_has_a_heading_and_nothing_else_has() -> None:
    assert sorted(line[4:] for line in page().split("\n") if line.startswith("### ")) == sorted(CODES)


def test_the_command_prints_the_page_and_nothing_else() -> None:
    words = COMMAND.partition(" > ")[0].split()[1:]
    assert (
        subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout == page()
    )
