"""What one GPU can show of this project in less than an hour.

    python -m benchmarks.gpu [--part 1..4] [--only TEXT] [--minutes 9] [--device cuda|cpu] [--jobs N] [--output gpu]

Part 1: facts of the machine, and attention kernels against float64. Part 2: the recipe from its start to a resumed run, and
several ranks on one device against one process, over gloo and over NCCL. Part 3: predicted memory against the allocator's.
Part 4: speed, of float8 too (`--only float8`).
Each part writes PART.md and PART.json into the output folder after each case, goes on after a failure, and stops starting cases
when its minutes are over. `--device cpu` runs all of it with small sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import (
    attention,
    facts,
    forks,
    memory,
    nccl_ranks,
    packed_documents,
    recipe,
    several_ranks,
    speed,
)
from benchmarks.gpu.cases import Case, Outcome, Where, run, side_by_side

PARTS: dict[int, tuple[Case, ...]] = {
    1: (*facts.CASES, *forks.CASES, *attention.CASES, *packed_documents.CASES),
    2: (*recipe.CASES, *several_ranks.CASES, *nccl_ranks.CASES),
    3: memory.CASES,
    4: speed.CASES,
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts; returns 1 where a case failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--part",
        type=int,
        action="append",
        choices=sorted(PARTS),
        help="a part; may be repeated; all of them if left out",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only cases whose name contains one of these, separated by commas",
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes that a part may take")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--jobs", type=int, help="cases that run side by side; 1 on a GPU and 2 on a CPU if left out"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("gpu"), metavar="DIR", help="folder of the tables and logs"
    )
    said = parser.parse_args(words)
    # So that the cases that run are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # Times on a CPU say nothing of a GPU's: there two cases may run side by side.
    jobs = said.jobs or (2 if said.device == "cpu" else 1)
    failed = False
    for part in said.part or sorted(PARTS):
        cases = [case for case in PARTS[part] if any(text in case.name for text in said.only.split(","))]
        ends = time.perf_counter() + said.minutes * 60
        outcomes: list[Outcome] = []
        one = functools.partial(_outcome, said, part, ends)
        for outcome in side_by_side(one, cases, jobs):
            outcomes.append(outcome)
            print(_text(outcome), flush=True)
            _write(said.output, part, outcomes)  # a machine that is lent may be taken back
        failed = failed or any(outcome.failure for outcome in outcomes)
    return int(failed)


def _outcome(said: argparse.Namespace, part: int, ends: float, case: Case) -> Outcome:
    left = ends - time.perf_counter()
    if left < 5:
        return Outcome(case.name, failure=f"not started: the {said.minutes:g} minutes of the part are over")
    folder = said.output / f"part{part}" / case.name.replace(" ", "_").replace("/", "_")
    return run(case, Where(said.device, said.device == "cpu", folder), min(case.limit, left))


def _write(folder: Path, part: int, outcomes: Sequence[Outcome]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"part{part}.json").write_text(
        json.dumps([dataclasses.asdict(o) for o in outcomes], indent=1) + "\n"
    )
    (folder / f"part{part}.md").write_text("\n\n".join(map(_text, outcomes)) + "\n")


def _text(outcome: Outcome) -> str:
    """A case as Markdown: its rows as tables, one for each set of columns."""
    lines = [f"### {outcome.name} ({outcome.seconds:.0f} s)", ""]
    columns: tuple[str, ...] = ()
    for row in outcome.rows:
        if tuple(row) != columns:
            columns = tuple(row)
            lines += ["", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        lines.append(
            "| "
            + " | ".join(str(value).replace("|", "/").replace("\n", " ") for value in row.values())
            + " |"
        )
    if outcome.failure:
        lines += ["", f"**Failed**: {outcome.failure}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
