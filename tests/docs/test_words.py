"""Pages, diagnostics and recipes are free of the words that CONTRIBUTING's "How we write" rules out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_import_order import ROOT

RULED_OUT = re.compile(
    r"\b(whoever|nobody|somebody|one's own|(is|are|was|were) told|in (torch|transformers)'s words)\b", re.I
)
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("README.md", "docs/**/*.md", "parallelizer/**/*.md", "recipes/*.py")
    for path in ROOT.glob(pattern)
    if path.parent.name != "api"  # docstrings, written by docs/api_pages.py
)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_it_names_the_actor_and_uses_direct_words(page: Path) -> None:
    found = [
        f"{page}:{number}: {line.strip()}"
        for number, line in enumerate((ROOT / page).read_text().splitlines(), 1)
        if RULED_OUT.search(line)
    ]
    assert not found, "\n".join(found)


def test_contributing_gives_ten_pairs() -> None:
    """Each shows a sentence that was found in this repository, and the one that replaced it."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| instead of | write |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(rows) == 10
    assert all(len(row) == 2 and all(row) for row in rows)
    assert any(RULED_OUT.search(before) for before, _ in rows)
    assert not any(RULED_OUT.search(after) for _, after in rows)
