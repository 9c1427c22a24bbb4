"""`parallelizer doctor`: what it prints, and its exit status."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallelizer.commands.doctor import facts, trials
from parallelizer.commands.doctor.command import Report, document, tell, text
from parallelizer.commands.doctor.trials import Trial
from tests.recipes.runs import typed

FINE = Trial("a", "works", "well", needed=True)
MISSING = Trial("c", "absent", "no GPU", "use none")
BROKEN = Trial("b", "broken", "it fell", "mend it", needed=True)


def test_only_what_is_needed_makes_it_ill() -> None:
    assert Report({}, (FINE, MISSING)).healthy
    assert Report({}, (Trial("b", "broken", "it fell", "mend it"),)).healthy
    assert not Report({}, (FINE, BROKEN)).healthy


def test_the_report_is_a_line_each_and_says_what_to_do() -> None:
    report = Report({"versions": {"torch": "9.9"}, "machine": {"memory": "1 GiB"}}, (FINE, BROKEN, MISSING))
    assert text(report).splitlines() == [
        "versions",
        "  torch   9.9",
        "",
        "machine",
        "  memory  1 GiB",
        "",
        "what works here",
        "  a       works: well",
        "  b       broken: it fell",
        "          mend it",
        "  c       absent: no GPU",
        "          use none",
        "",
        "needed and broken: b",
    ]
    assert document(report) == {
        "healthy": False,
        "versions": {"torch": "9.9"},
        "machine": {"memory": "1 GiB"},
        "trials": [
            {"name": "a", "state": "works", "text": "well", "help": None, "needed": True},
            {"name": "b", "state": "broken", "text": "it fell", "help": "mend it", "needed": True},
            {"name": "c", "state": "absent", "text": "no GPU", "help": "use none", "needed": False},
        ],
    }


def test_each_line_is_told_as_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    seen: list[str] = []

    def trying() -> Iterator[Trial]:
        for trial in (FINE, MISSING, BROKEN):
            seen.append(stream.getvalue())
            yield trial

    monkeypatch.setattr(trials, "all_trials", trying)
    groups = {"versions": lambda: [("torch", "9.9")], "devices": lambda: [("GPUs", "none")]}
    monkeypatch.setattr(facts, "GROUPS", groups)
    report = tell(stream)
    assert report == Report(
        {"versions": {"torch": "9.9"}, "devices": {"GPUs": "none"}}, (FINE, MISSING, BROKEN)
    )
    assert [text.split()[-1] for text in seen] == [
        "9.9",
        "well",
        "none",
    ]  # each is told before the next is tried
    squeezed = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert squeezed == [" ".join(line.split()) for line in text(report).splitlines()]


@pytest.mark.slow
@pytest.mark.ranks
def test_the_command_runs_whole_and_leaves_nothing(tmp_path: Path) -> None:
    done = typed("doctor", "--json", cwd=tmp_path, module="parallelizer", timeout=200)
    told = json.loads(done.out)
    assert done.status == 0 and told["healthy"] and not done.err
    assert [t["name"] for t in told["trials"] if t["needed"]] == [
        "torch is imported", "a plan is read", "a configuration is composed", "a step is traced on a fake world",
        "two gloo ranks add up",
    ]  # fmt: skip
    assert all(t["help"] for t in told["trials"] if t["state"] != "works")


def test_it_takes_no_overrides(tmp_path: Path) -> None:
    done = typed("doctor", "parallel=tp2", cwd=tmp_path, module="parallelizer")
    assert done.status == 2 and "takes no overrides" in done.err
