"""A short run of the fuzzer, with one seed; and that the fuzzer sees what it should."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from parallelizer.child.children import in_children
from parallelizer.commands import main as cli
from parallelizer.language import parse_plan as parse
from tests.fuzz import drive
from tests.fuzz.campaign import campaign, report
from tests.fuzz.corpus import Case, case
from tests.fuzz.drive import Outcome
from tests.fuzz.judge import MAX_GROWTH, judge
from tests.fuzz.shrink import shrink

SEED = 1
CASES = 100


def test_no_mutation_of_what_people_write_ends_in_anything_but_a_diagnostic(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tally = campaign(SEED, range(CASES), apart_every=CASES, most_failures=3)
    with capsys.disabled():
        print(f"\n{report(tally, SEED)}")
    assert not tally.failures and tally.cases == CASES


def test_a_case_is_the_same_whenever_it_is_made() -> None:
    assert [case(7, n) for n in range(50)] == [case(7, n) for n in range(50)]
    assert len({case(7, n) for n in range(50)}) > 45
    assert case(7, 0) != case(8, 0)


PLAN = Case("plan", "x", b"rules: {layers.*: fsdp}\n")


def outcome(status: int | None = 0, out: str = "x: well formed\n", err: str = "", **more: object) -> Outcome:
    figures = {"seconds": 0.1, "elapsed": 0.1, "grown": 0, "crash": ""} | more
    return Outcome(status, out, err, **figures)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "ended", "kind"),
    [
        (PLAN.content, outcome(), None),
        (PLAN.content, outcome(1, "", "error[x]: y\n\n1 error\n"), None),
        (PLAN.content, outcome(1, "", "error[x]: y\n"), "output"),
        (PLAN.content, outcome(1, "", "\x1b[2J\n1 error\n"), "output"),
        (PLAN.content, outcome(2), "status"),
        (PLAN.content, outcome(None), "status"),
        (b"rules: [", outcome(), "status"),
        (b"\xff", outcome(), "status"),
        (PLAN.content, outcome(crash="KeyError"), "traceback"),
        (PLAN.content, outcome(seconds=1.1), "slow"),
        (PLAN.content, outcome(grown=MAX_GROWTH + 1), "memory"),
    ],
)
def test_the_judge_sees_faults(content: bytes, ended: Outcome, kind: str | None) -> None:
    found = judge(PLAN.with_content(content), ended)
    assert (found and found.partition(":")[0]) == kind, found


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        ('{"valid": true, "diagnostics": []}', None),
        ('{"valid": false, "diagnostics": []}', "output"),
        ("{", "output"),
        (
            '{"valid": true, "diagnostics": [{"code": "x", "message": "y", "severity": "error", "span": null}]}',
            "output",
        ),
        (
            '{"valid": true, "diagnostics": [{"code": "x", "message": "y", "severity": "note", "span": '
            '{"file": "fuzzed.yaml", "line": 3, "column": 1, "end_column": 2}}]}',
            "span",
        ),
    ],
)
def test_the_judge_reads_documents(document: str, kind: str | None) -> None:
    found = judge(Case("plan", "x", PLAN.content, as_json=True), outcome(0, document))
    assert (found and found.partition(":")[0]) == kind, found


def test_a_crash_is_caught_and_made_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = parse.parse_layouts

    def broken(node: object, findings: object) -> object:
        if "stream" in str(node):
            raise KeyError("stream")
        return whole(node, findings)  # type: ignore[arg-type]

    monkeypatch.setattr(parse, "parse_layouts", broken)
    big = Case(
        "plan", "x", b"version: 1\nlayouts:\n  stream: shard(1)\nrules:\n  layers.*: fsdp\n  norm: fsdp\n"
    )

    def fails(one: Case) -> bool:
        return (judge(one, drive.run(one, tmp_path)) or "").startswith("traceback: ")

    assert fails(big)
    assert len(shrink(big, fails).content) < 25


def _driven_greedily(folder: Path) -> drive.Outcome:
    """In a process of its own, whose peak so far is what it holds: only what goes beyond the peak is measured."""

    def greedy(arguments: object) -> int:
        sum(range(3_000_000))
        return len(bytearray(80_000_000)) * 0

    drive.__dict__.update(main=greedy, _compile=lambda path: None)
    return drive.run(PLAN, folder)


def test_memory_and_time_are_measured(tmp_path: Path) -> None:
    [ended] = in_children([(_driven_greedily, tmp_path)])
    assert ended.seconds > 0.01 and ended.grown > 70_000_000 and ended.status == 0


def test_a_case_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(arguments: object) -> int:
        while True:
            io.StringIO()

    monkeypatch.setattr(drive, "GIVE_UP", 0.1)
    monkeypatch.setattr(drive, "main", endless)
    assert "stopped" in drive.run(PLAN, tmp_path).crash
    assert cli.main is not endless
