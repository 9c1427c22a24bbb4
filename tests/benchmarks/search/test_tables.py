"""The tables of `python -m benchmarks.search` on a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.search.tables import Table, write

PAGE = "before\n<!-- search:begin -->\n### Old\n\nkept\n\n### Time\n\nold\n<!-- search:end -->\nbehind\n"


def test_a_part_replaces_itself_and_leaves_the_others(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    write(page, [Table("Time", "new", ["a"], [["1"]], ["it is slow"]), Table("More", "said", ["b"], [])])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("behind\n")
    assert text.index("### Old\n\nkept") < text.index("### Time\n\nnew") < text.index("### More")
    assert "old" not in text.replace("### Old", "") and "| 1 |" in text and "- it is slow" in text
    write(page, [Table("Time", "new", ["a"], [["1"]])])
    assert "it is slow" not in page.read_text() and "### More" in page.read_text()


def test_a_page_without_a_place_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match=r"page\.md has no place"):
        write(page, [])
