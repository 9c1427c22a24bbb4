"""`explain CODE`, `explain` and a word that is no code."""

from __future__ import annotations

import io
import json

import pytest

from parallelizer.commands.explain.codes import explain_code, list_codes, nearest_codes
from parallelizer.commands.main import main

Captured = pytest.CaptureFixture[str]


def explained(name: str, width: int = 80) -> str:
    stream = io.StringIO()
    explain_code(name, stream, width)
    return stream.getvalue()


def test_a_code_is_explained_with_its_example_as_it_is_refused(capsys: Captured) -> None:
    assert main(["explain", "unknown-style"]) == 0
    assert (
        "    # plan.yaml\n"
        "    rules:\n"
        "      layers.*: fdsp\n"
        "\n"
        "    $ python -m parallelizer validate plan=plan.yaml\n"
        "error[unknown-style]: there is no style 'fdsp'\n"
        "  --> plan.yaml:2:13\n"
        " 2 |   layers.*: fdsp\n"
        "   |             ^^^^\n"
        "  = help: did you mean fsdp? the styles are "
    ) in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 100])
def test_text_is_wrapped_to_the_width(width: int) -> None:
    text = explained("heads-not-divisible", width)
    head = "error[heads-not-divisible]: the number of attention heads is not divisible by tp\n\n"
    assert text.startswith(head)
    assert all(len(line) <= width for line in text.split("\n\n")[1].split("\n"))
    assert "configs/plans/llama.yaml:" in text and "tp can be 1, 2, 4, 8" in text


def test_what_no_file_triggers_is_explained_with_a_command() -> None:
    text = explained("lock-not-found")
    assert (
        "No file triggers it: a lock is not part of a plan or preset.\n    $ python -m parallelizer plan --locked nowhere.lock\n"
    ) in text


def test_what_to_do_comes_last() -> None:
    text = explained("missing-style")
    assert text.split("\n\n")[-1] == (
        "Fix: Name the style: `output: colwise`, or with options `output: {style:\ncolwise, output: replicate}`.\n"
    )


def test_files_are_shown_as_they_stand_in_the_section_and_in_json_with_every_line(capsys: Captured) -> None:
    assert "      layers.0: fsdp\n      # ...\n      layers.1000: fsdp\n" in explained("plan-limit")
    assert main(["explain", "--json", "plan-limit"]) == 0
    [code] = json.loads(capsys.readouterr().out)["codes"]
    assert code["example"]["files"]["plan.yaml"].count("fsdp") == 1001


def test_the_list_fits_a_narrow_terminal() -> None:
    stream = io.StringIO()
    list_codes(stream, 60)
    assert all(len(line) <= 60 for line in stream.getvalue().split("\n") if line.startswith("  "))


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("unmached-glob", "unmatched-glob"),
        ("divisible", "batch-not-divisible"),
        ("unknown_style", "unknown-style"),
        ("Slot-Twice", "slot-twice"),
    ],
)
def test_the_nearest_codes_are_named(word: str, near: str) -> None:
    assert near in nearest_codes(word)
