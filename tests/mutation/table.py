"""The verdicts as a page: the table by kind, and by name everything that was judged wrongly."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence

import torch

from benchmarks.proofs.markdown import table
from tests.mutation.generate import KINDS
from tests.mutation.judge import Verdict

MARKER = "mutations"
Test = Callable[[Verdict], bool]
COLUMNS: dict[str, Test] = {
    "harmful, refused": lambda v: v.harmful and v.refused,
    "**harmful, missed**": lambda v: v.harmful and not v.refused,
    "harmless, accepted": lambda v: not v.harmful and not v.refused,
    "**harmless, refused**": lambda v: not v.harmful and v.refused,
}


def markdown(verdicts: Sequence[Verdict], command: str, seconds: float) -> str:
    """The table, what was run for it, and the lists of what slipped through and of what was refused for nothing."""
    kinds = [k for k in KINDS if any(v.mutant.kind == k for v in verdicts)]
    rows = [_row(kind, [v for v in verdicts if v.mutant.kind == kind]) for kind in kinds]
    rows.append(_row("**all**", verdicts))
    head = ["what is broken", "mutants", *COLUMNS, "an error at the changed line"]
    parts = [
        _summary(verdicts, command, seconds),
        table(head, rows),
        _list("Harmful and missed", [v for v in verdicts if v.harmful and not v.refused]),
        _list("Harmless and refused", [v for v in verdicts if v.refused and not v.harmful]),
    ]
    return "\n\n".join(parts)


def wrong(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """What was judged wrongly."""
    return [v for v in verdicts if v.harmful != v.refused]


def _row(kind: str, verdicts: Sequence[Verdict]) -> list[str]:
    counts = [sum(map(test, verdicts)) for test in COLUMNS.values()]
    placed = [v for v in verdicts if v.refused and v.mutant.line is not None]
    there = sum(
        any(line == v.mutant.line for _, severity, line in v.found if severity == "error") for v in placed
    )
    share = f"{there} of {len(placed)}" if placed else "-"
    return [kind, str(len(verdicts)), *map(str, counts), share]


def _summary(verdicts: Sequence[Verdict], command: str, seconds: float) -> str:
    how = {h: sum(v.harm.how == h for v in verdicts) for h in ("text", "program", "proof")}
    by_plan: dict[str, int] = {}
    for v in verdicts:
        by_plan[v.mutant.plan] = by_plan.get(v.mutant.plan, 0) + 1
    plans = ", ".join(f"{n:,} of {plan}" for plan, n in by_plan.items())
    took = "" if "--known" in command else f" in {seconds:,.0f} s"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    return (
        f"{len(verdicts):,} mutants ({plans}) by `{command}`{took} on {machine}.\n"
        f"{how['text']:,} give no program (they do not parse, match or compile) and do harm by that; {how['program']:,} "
        f"compile to the same program as the plan; {how['proof']:,} were run on ranks and compared with one process."
    )


def _list(title: str, verdicts: Sequence[Verdict]) -> str:
    lines = [f"### {title}: {len(verdicts)}"]
    lines += [
        f"- {v.mutant.plan} on {v.mutant.preset}, {v.mutant.kind}: {v.mutant.name}: `{v.mutant.changed}`: "
        f"{v.harm.wrong or ', '.join(v.codes)}"
        for v in verdicts
    ]
    return "\n".join(lines) if verdicts else lines[0]
