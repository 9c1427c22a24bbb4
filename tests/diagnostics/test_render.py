"""Diagnostics as text: whole renderings, and what holds for all of them."""

from __future__ import annotations

import io
import re
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.diagnostics.diagnostic import Diagnostic, Related, Span
from parallelizer.diagnostics.render import render, write

PLAN = "rules:\n  layers.*:  {style: colwize}\n  norm: [fsdp, fsdp]\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a plan in it."""
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(PLAN)
    return tmp_path


def same(text: str, expected: str) -> None:
    assert text == dedent(expected).strip("\n")


def test_the_wrong_line_stands_with_carets_under_it_and_the_help_below() -> None:
    found = Diagnostic(
        "unknown-style", "there is no style 'colwize'", Span("plan.yaml", 2, 22, 29), "did you mean colwise?"
    )
    same(
        render(found),
        """
        error[unknown-style]: there is no style 'colwize'
          --> plan.yaml:2:22
         2 |   layers.*:  {style: colwize}
           |                      ^^^^^^^
          = help: did you mean colwise?
        """,
    )


def test_a_second_place_has_its_own_frame_and_label() -> None:
    found = Diagnostic(
        "slot-twice",
        "fsdp and fsdp fill the same slot",
        Span("plan.yaml", 3, 16, 20),
        "keep one",
        related=(Related(Span("plan.yaml", 3, 10, 14), "the other one"),),
    )
    same(
        render(found),
        """
        error[slot-twice]: fsdp and fsdp fill the same slot
          --> plan.yaml:3:16
         3 |   norm: [fsdp, fsdp]
           |                ^^^^
          ::: plan.yaml:3:10
         3 |   norm: [fsdp, fsdp]
           |          ---- the other one
          = help: keep one
        """,
    )


def test_an_override_is_shown_itself() -> None:
    found = Diagnostic(
        "wrong-type",
        "the size of tp is 'x'",
        Span("<override parallel.mesh.tp=x>", 1, 18, 19),
        "a number",
        "warning",
    )
    same(
        render(found),
        """
        warning[wrong-type]: the size of tp is 'x'
          --> the command line
           | parallel.mesh.tp=x
           |                  ^
          = help: a number
        """,
    )


def test_what_has_no_place_has_no_frame() -> None:
    same(
        render(Diagnostic("no-rules", "nothing", None, "do something", "note")),
        """
        note[no-rules]: nothing
          = help: do something
        """,
    )
    same(
        render(Diagnostic("x", "y", Span("<configuration>"))),
        """
        error[x]: y
          --> <configuration>
        """,
    )


@pytest.mark.parametrize(
    "span", [Span("gone.yaml", 2, 3, 4), Span("plan.yaml", 99, 1, 2), Span(".", 1, 1, 1), Span("a\0b")]
)
def test_a_line_that_cannot_be_read_any_more_is_left_out(span: Span) -> None:
    text = render(Diagnostic("x", "y", span, "z", related=(Related(span, "because"),)))
    assert text.split("\n") == [
        "error[x]: y",
        f"  --> {render_place(span)}",
        f"  ::: {render_place(span)}",
        "     because",
        "  = help: z",
    ]


def render_place(span: Span) -> str:
    return str(span)


def test_a_file_that_has_changed_is_read_again() -> None:
    found = Diagnostic("x", "y", Span("plan.yaml", 1, 1, 6))
    assert "rules:" in render(found)
    Path("plan.yaml").write_text("other: 1 and longer\n")
    assert "other: 1" in render(found)


def test_messages_and_help_are_wrapped_at_blanks_only() -> None:
    found = Diagnostic(
        "x", "word " * 40, None, "type ++parallel.styles.fsdp.reshard_after_forward=false " * 3
    )
    lines = render(found, width=60).split("\n")
    assert all(len(line) <= 70 for line in lines)
    assert sum("++parallel.styles.fsdp.reshard_after_forward=false" in line for line in lines) == 3


def test_nothing_in_a_file_or_a_message_is_obeyed_by_the_terminal() -> None:
    Path("plan.yaml").write_text("a: \x1b[31mred\x07\x9b\n", encoding="utf-8")
    text = render(Diagnostic("x", "the key \x1b[2J", Span("plan.yaml", 1, 4, 5), "\x1b]0;title\x07"))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert "a: \N{REPLACEMENT CHARACTER}[31mred" in text


def test_tabs_take_one_column_so_that_carets_stay_below() -> None:
    Path("plan.yaml").write_text("a:\tb\n")
    lines = render(Diagnostic("x", "y", Span("plan.yaml", 1, 4, 5))).split("\n")
    assert lines[2] == " 1 | a: b" and lines[3] == "   |    ^"


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(1, 310), st.integers(0, 310), st.integers(40, 120), st.booleans())
def test_carets_stand_under_the_span_however_long_the_line(
    length: int, column: int, width_of: int, width: int, related: bool
) -> None:
    line = "".join(chr(ord("a") + i % 26) for i in range(length))
    column = min(column, length)
    span = Span(f"<override {line}>", 1, column, column + width_of)
    found = Diagnostic("x", "y", None if related else span, related=(Related(span, ""),) if related else ())
    shown, carets = render(found, width=width).split("\n")[-2:]
    assert len(shown) <= width + 1 and len(carets) <= width + 1
    start = carets.index("-" if related else "^", 4)
    assert shown[start] == line[column - 1]
    marked = shown[start : start + len(carets[start:])]
    assert line[column - 1 :].startswith(marked.removesuffix("…"))
    assert len(marked) == max(1, min(width_of, length - column + 1)) or len(shown) >= width - 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_and_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    findings = [
        Diagnostic("unknown-style", "there is no style", Span("plan.yaml", 2, 22, 29), "help"),
        Diagnostic("x", "y", severity="note", related=(Related(Span("plan.yaml", 1, 1, 2), "z"),)),
    ]
    plain, terminal = io.StringIO(), Terminal()
    write(findings, plain)
    write(findings, terminal)
    assert "\x1b" not in plain.getvalue() and "\x1b[31merror[unknown-style]\x1b[0m" in terminal.getvalue()
    assert re.sub(r"\x1b\[\d*m", "", terminal.getvalue()) == plain.getvalue()


def test_findings_are_written_in_order_with_a_count() -> None:
    stream = io.StringIO()
    write(
        [
            Diagnostic("b", "second", Span("plan.yaml", 2, 1, 2)),
            Diagnostic("a", "first", Span("plan.yaml", 1, 1, 2), severity="warning"),
        ],
        stream,
    )
    text = stream.getvalue()
    assert text.index("first") < text.index("second") and text.endswith("\n\n1 error, 1 warning\n")
    stream = io.StringIO()
    write([], stream)
    assert stream.getvalue() == ""
    write([Diagnostic("b", "second")], stream, summary=False)
    assert stream.getvalue() == "error[b]: second\n\n"


@pytest.mark.parametrize("columns", ["1", "40", "500"])
def test_the_width_follows_the_terminal_within_bounds(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stream = io.StringIO()
    write([Diagnostic("x", "word " * 100)], stream)
    longest = max(map(len, stream.getvalue().split("\n")))
    assert (35 <= longest <= 40) if columns != "500" else (100 <= longest <= 120)
