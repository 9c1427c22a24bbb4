"""The page of all codes is what the registry makes, run today."""

from __future__ import annotations

import contextlib
import io

import pytest

from parallelizer.codes import CODES, Code
from parallelizer.codes.page import COMMAND, blocks, page
from parallelizer.config import config_folder
from tests.codes.ran import run

PAGE = config_folder().parent / "docs" / "diagnostics.md"


def test_the_page_is_up_to_date() -> None:
    """But for what only a traced step shows, which the slow test below traces."""
    written = PAGE.read_text()
    stale = [block[0] for block in blocks(False, result) if "\n".join(block) not in written]
    assert not stale, f"run: {COMMAND}"
    assert all(f"\n### {name}\n" in written for name in CODES)
    assert [name for name in headings(written) if name not in CODES] == []


@pytest.mark.slow
def test_the_whole_page_is_up_to_date() -> None:
    assert page() == PAGE.read_text(), f"run: {COMMAND}"


def test_a_page_with_another_text_is_found_stale() -> None:
    written = PAGE.read_text().replace("there is no style of this name", "there is no such style")
    assert [b[0] for b in blocks(False, result) if "\n".join(b) not in written] == ["### unknown-style"]


def test_nothing_on_the_page_is_of_this_machine() -> None:
    assert str(config_folder().parent) not in PAGE.read_text() and "/tmp/" not in PAGE.read_text()


def test_making_the_page_prints_nothing_else() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        next(iter(blocks(False, result)))
    assert printed.getvalue() == ""


def result(code: Code) -> list[str]:
    return list(run(code).lines)


def headings(text: str) -> list[str]:
    return [line[4:] for line in text.split("\n") if line.startswith("### ")]
