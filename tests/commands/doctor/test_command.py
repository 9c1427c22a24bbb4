"""`parallelizer doctor`: what it prints, and its exit status."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallelizer.commands.doctor import facts, trials
from parallelizer.commands.doctor.command import WIDTH, Report, document, examine
from parallelizer.commands.doctor.trials import Trial
from tests.recipes.runs import typed

FINE = Trial("a", "works", "well", needed=True)
MISSING = Trial("c", "absent", "no GPU", "use none")
BROKEN = Trial("b", "broken", "it fell", "mend it", needed=True)


def test_only_what_is_needed_makes_it_ill() -> None:
    assert Report({}, (FINE, MISSING)).healthy
    assert Report({}, (Trial("b", "broken", "it fell", "mend it"),)).healthy
    assert not Report({}, (FINE, BROKEN)).healthy


def examined(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> tuple[Report, list[str]]:
    """The report on a made-up machine, and what stood in the stream when each trial began."""
    seen: list[str] = []

    def trying() -> Iterator[Trial]:
        for trial in (FINE, BROKEN, MISSING):
            seen.append(stream.getvalue() if stream else "")
            yield trial

    monkeypatch.setattr(trials, "all_trials", trying)
    groups = {"versions": lambda: [("torch", "9.9")], "devices": lambda: [("GPUs", "none")]}
    monkeypatch.setattr(facts, "GROUPS", groups)
    return examine(stream), seen


def test_the_report_has_a_line_for_each_fact_and_trial_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    report, _ = examined(monkeypatch, stream)
    assert stream.getvalue().splitlines() == [
        "versions",
        f"  {'torch':{WIDTH}}  9.9",
        "",
        "devices",
        f"  {'GPUs':{WIDTH}}  none",
        "",
        "what works here",
        f"  {'a':{WIDTH}}  works: well",
        f"  {'b':{WIDTH}}  broken: it fell",
        f"  {'':{WIDTH}}  mend it",
        f"  {'c':{WIDTH}}  absent: no GPU",
        f"  {'':{WIDTH}}  use none",
        "",
        "needed, but broken: b",
    ]
    assert document(report) == {
        "healthy": False,
        "versions": {"torch": "9.9"},
        "devices": {"GPUs": "none"},
        "trials": [
            {"name": "a", "state": "works", "text": "well", "help": None, "needed": True},
            {"name": "b", "state": "broken", "text": "it fell", "help": "mend it", "needed": True},
            {"name": "c", "state": "absent", "text": "no GPU", "help": "use none", "needed": False},
        ],
    }


def test_each_line_is_printed_before_the_next_trial_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    report, seen = examined(monkeypatch, stream)
    assert [text.split()[-1] for text in seen] == ["9.9", "well", "it"]
    assert examined(monkeypatch, None) == (report, ["", "", ""])


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
