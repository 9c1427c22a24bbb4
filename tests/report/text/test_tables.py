"""Tables keep to their width: paths are broken where a reader would break them, spare columns go first."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from parallelizer.report.text.tables import Column, console, wrap_path, write

NAMES = st.text("abcdefghij_0123456789", min_size=1, max_size=12)
SEGMENTS = st.one_of(
    NAMES, st.lists(NAMES, min_size=2, max_size=4).map(lambda names: f"{{{','.join(names)}}}")
)
PATHS = st.lists(SEGMENTS, min_size=1, max_size=6).map(".".join)


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (36, ["layers.{0..125}.feed_forward.w{1,3}", "  .weight"]),
        (30, ["layers.{0..125}.feed_forward", "  .w{1,3}.weight"]),
        (18, ["layers.{0..125}", "  .feed_forward", "  .w{1,3}.weight"]),
    ],
)
def test_paths_are_broken_before_dots(width: int, lines: list[str]) -> None:
    assert wrap_path("layers.{0..125}.feed_forward.w{1,3}.weight", width) == lines


def test_braces_are_broken_after_commas_only_when_they_must() -> None:
    path = "layers.{0..3}.{attention_norm,ffn_norm}.weight"
    assert wrap_path(path, 32) == ["layers.{0..3}", "  .{attention_norm,ffn_norm}", "  .weight"]
    assert wrap_path(path, 20) == ["layers.{0..3}", "  .{attention_norm,", "  ffn_norm}.weight"]


def test_dots_inside_braces_part_nothing() -> None:
    path = "layers.*.{attention.wo,feed_forward.w2}.weight"
    assert wrap_path(path, 36) == ["layers.*", "  .{attention.wo,feed_forward.w2}", "  .weight"]


@given(PATHS, st.integers(6, 80))
def test_wrapped_paths_are_whole_and_narrow(path: str, width: int) -> None:
    lines = wrap_path(path, width)
    assert "".join(line.removeprefix("  ") for line in lines) == path
    assert all(len(line) <= width for line in lines)
    if len(path) <= width:
        assert lines == [path]


def shown(columns: list[Column], rows: list[list[str]], width: int) -> list[str]:
    stream = io.StringIO()
    write(console(stream, width), Text("title"), columns, rows)
    return stream.getvalue().splitlines()


COLUMNS = [
    Column("module", wrap="path"),
    Column("n", right=True),
    Column("style", spare=1),
    Column("flow", wrap="words"),
    Column("rule", spare=2),
]
ROWS = [
    [
        "layers.{0..125}.attention.wq.weight",
        "126",
        "colwise",
        "input x: shard(1) -> replicate",
        "llama.yaml:8",
    ],
    ["norm.weight", "1", "sequence", "", "llama.yaml:13"],
]


@pytest.mark.parametrize("width", [200, 100, 80, 60, 50, 46])
def test_no_line_is_longer_than_the_width_or_ends_in_blanks(width: int) -> None:
    for line in shown(COLUMNS, ROWS, width):
        assert len(line) <= width
        assert line == line.rstrip()


def test_all_of_it_is_there_when_there_is_room() -> None:
    lines = shown(COLUMNS, ROWS, 120)
    assert lines[0] == "title"
    assert lines[1].split() == ["module", "n", "style", "flow", "rule"]
    assert lines[2].startswith(f"  {ROWS[0][0]}  ")
    for cell in ROWS[0]:
        assert cell in lines[2]


def test_the_most_spare_column_goes_first() -> None:
    assert shown(COLUMNS, ROWS, 60)[1].split() == ["module", "n", "style", "flow"]
    assert shown(COLUMNS, ROWS, 48)[1].split() == ["module", "n", "flow"]


def test_a_column_without_content_is_left_out() -> None:
    rows = [["a", "1", "", "", ""]]
    assert shown(COLUMNS, rows, 100)[1].split() == ["module", "n"]


def test_brackets_and_colons_are_no_markup() -> None:
    rows = [["layers.[bold].x", "1", "s", ":smile:", "plan.yaml:8:"]]
    assert "layers.[bold].x" in shown(COLUMNS, rows, 100)[2]
    assert ":smile:" in shown(COLUMNS, rows, 100)[2]


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("20", 40), ("", 100), ("0", 100), ("wide", 100)])
def test_what_is_written_into_a_file_is_as_wide_as_columns_says(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert console(io.StringIO()).width == width
    assert console(io.StringIO(), 70).width == 70
    monkeypatch.delenv("COLUMNS")
    assert console(io.StringIO()).width == 100
