"""Many cases one after another, and what came of them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.corpus import Case, case
from tests.fuzz.drive import Outcome, run, run_apart, warm_up
from tests.fuzz.judge import MAX_SECONDS, judge
from tests.fuzz.shrink import shrink


@dataclass
class Tally:
    """What came of a campaign: how many cases of each kind and status, the worst figures, what failed."""

    cases: int = 0
    apart: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    slowest: tuple[float, int] = (0.0, -1)
    largest: tuple[int, int] = (0, -1)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """A case that failed: its number, what is wrong, and the smallest case found with the same fault."""

    seed: int
    index: int
    case: Case
    wrong: str
    smallest: Case


def campaign(seed: int, indices: Iterable[int], apart_every: int = 0, most_failures: int = 20) -> Tally:
    """Run the cases of some numbers; each `apart_every`-th one in a process of its own as well."""
    tally = Tally()
    warm_up()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index in indices:
            one = case(seed, index)
            outcome = _settled(one, run(one, folder), folder)
            wrong = judge(one, outcome)
            if not wrong and apart_every and index % apart_every == 0:
                tally.apart += 1
                wrong = _differs(one, outcome, run_apart(one, folder))
            tally.cases += 1
            key = f"{one.kind} {outcome.status}"
            tally.statuses[key] = tally.statuses.get(key, 0) + 1
            tally.slowest = max(tally.slowest, (outcome.seconds, index))
            tally.largest = max(tally.largest, (outcome.grown, index))
            if wrong:
                tally.failures.append(Failure(seed, index, one, wrong, _smallest(one, wrong, folder)))
                print(f"case {index}: {wrong[-300:]}", file=sys.stderr, flush=True)
                if len(tally.failures) >= most_failures:
                    break
    return tally


def _settled(one: Case, outcome: Outcome, folder: Path) -> Outcome:
    """The outcome; of a case over the time, that of a second run if it was quicker, because the machine may
    have been busy and a garbage collection of what others left may have fallen into it.
    """
    if outcome.seconds <= MAX_SECONDS or outcome.crash:
        return outcome
    again = run(one, folder)
    return again if again.seconds < outcome.seconds else outcome


def _differs(one: Case, here: Outcome, apart: Outcome) -> str | None:
    if apart.crash:
        return f"traceback: in a process of its own: {apart.crash}"
    if apart.status != here.status:
        return f"status: {apart.status} in a process of its own, {here.status} here"
    return None


def _smallest(one: Case, wrong: str, folder: Path) -> Case:
    kind = wrong.partition(":")[0]
    if kind in ("slow", "memory") or "own process" in wrong or "process of its own" in wrong:
        return one

    def fails(smaller: Case) -> bool:
        found = judge(smaller, run(smaller, folder))
        return found is not None and found.partition(":")[0] == kind

    return shrink(one, fails)


def report(tally: Tally, seed: int) -> str:
    """The figures, and every failing case with how to run it again."""
    lines = [
        f"{tally.cases - len(tally.failures):,} of {tally.cases:,} cases without a fault (seed {seed}; "
        f"{tally.apart:,} of them in a process of their own too)",
        "  by kind and exit status: " + ", ".join(f"{k}: {n:,}" for k, n in sorted(tally.statuses.items())),
        f"  slowest {tally.slowest[0]:.2f} s of processor time (case {tally.slowest[1]}), "
        f"most memory {tally.largest[0] / 2**20:.0f} MiB (case {tally.largest[1]})",
    ]
    for failure in tally.failures:
        smallest = failure.smallest
        shown = smallest.words if smallest.kind == "override" else smallest.content[:400]
        lines += [
            f"case {failure.index} from {failure.case.source}: {failure.wrong[:1500]}",
            f"  python -m tests.fuzz --seed {failure.seed} --only {failure.index}",
            f"  smallest: {shown!r}" + (" ..." if len(smallest.content) > 400 else ""),
        ]
    return "\n".join(lines)
