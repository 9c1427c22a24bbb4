"""Judge all cases, ask `validate` and `verify` about them, and print the table.

python -m tests.silent --jobs 2 --json silent.json     # goes on where an earlier run with this file ended
python -m tests.silent lm/ --only judge                # cases by a part of their names, or by preset: @cp2
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import inspect
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, get_args

import torch
import torch._dynamo

from tests.silent.case import Case, Verdict, all_cases, load
from tests.silent.judge import judge
from tests.silent.table import table, unlisted
from tests.silent.tools import configured, static, validate, verify

ASKED = ("judge", "static", "validate", "verify")
LIMIT = 300.0
"""Seconds that a case may take; what takes longer is ended, and counts as neither accepted nor refused."""


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for. The exit status is 1 if the judge disagrees with an expectation, or a
    command takes a case for what it is not that is not known for it.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.silent", description=__doc__.split("\n")[0])
    parser.add_argument("filters", nargs="*", help="parts of names; @preset for a preset's cases")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (1)")
    parser.add_argument("--only", action="append", choices=ASKED, help="leave the other parts out")
    parser.add_argument("--expected", action="append", choices=get_args(Verdict), help="these cases alone")
    parser.add_argument("--json", type=Path, help="the file of the records; what it has is not run again")
    parser.add_argument("--again", action="store_true", help="run what the file has once more")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)  # a process that forks must not have run OpenMP threads
    asked = arguments.only or list(ASKED)
    expected = arguments.expected or get_args(Verdict)
    chosen = [c for c in all_cases() if _chosen(c, arguments.filters) and c.expected in expected]
    if not chosen:
        parser.error(f"no case has {' or '.join(arguments.filters)} in its name")
    file: Path | None = arguments.json
    known: dict[str, Any] = json.loads(file.read_text()) if file and file.exists() else {}
    records = {case.name: _record(case, known.get(case.name)) for case in chosen}
    todo = [
        (case, parts)
        for case in chosen
        if (parts := [p for p in asked if arguments.again or records[case.name][_key(p)] is None])
    ]
    gc.collect()
    gc.freeze()  # a fork need not look for garbage in what is imported
    for done, (case, found) in enumerate(_run(todo, arguments.jobs), start=1):
        record = records[case.name]
        record.update(found)
        off = "" if record["verdict"] in (None, case.expected) else f"  EXPECTED {case.expected}"
        words = [f"{p} {record[p]['accepted']}" for p in ASKED[1:] if record[p] is not None]
        print(
            f"{done}/{len(todo)} {case.name}: {record['verdict']} ({record['error']}){off} {' '.join(words)}",
            flush=True,
        )
        if file:
            known[case.name] = record
            file.write_text(json.dumps(known, indent=1))
    print(table(records.values()))
    if missed := unlisted(records.values()):
        print(
            "", f"not among the known misses of tests/silent/table.py ({len(missed)}):", *missed, sep="\n  "
        )
    return bool(missed) or any(r["verdict"] not in (None, r["expected"]) for r in records.values())


def _chosen(case: Case, filters: Sequence[str]) -> bool:
    return not filters or any(case.preset == f[1:] if f.startswith("@") else f in case.name for f in filters)


def _key(part: str) -> str:
    return "verdict" if part == "judge" else part


def _record(case: Case, known: Any) -> dict[str, Any]:
    """What is known of a case, if it is still the same: its expectation may have changed."""
    of = (
        case.plan,
        case.preset,
        repr(case.model.entries),
        repr(case.model.arguments),
        case.model.rows,
        case.model.length,
    )
    sources = [inspect.getsource(inspect.getmodule(load(path))) for path in (case.model.target, case.loss)]
    digest = hashlib.sha256(repr((of, sources)).encode()).hexdigest()[:16]
    fresh = {"verdict": None, "error": "", "static": None, "validate": None, "verify": None, "seconds": {}}
    kept = {k: known.get(k, v) for k, v in fresh.items()} if known and known["digest"] == digest else fresh
    return {
        "name": case.name, "preset": case.preset, "expected": case.expected, "why": case.why, "digest": digest,
        **kept,
    }  # fmt: skip


def _run(todo: Sequence[tuple[Case, list[str]]], jobs: int) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each case in a process of its own, forked from this one, which has everything imported."""
    fork = multiprocessing.get_context("fork")
    waiting, running = list(reversed(todo)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            case, parts = waiting.pop()
            mine, other = fork.Pipe(duplex=False)
            process = fork.Process(target=_ask, args=(case, parts, other))
            process.start()
            other.close()
            running[mine] = (case, process, time.monotonic())
        for pipe in wait(list(running), timeout=1.0):
            case, process, _ = running.pop(pipe)
            try:
                found = pipe.recv()
            except EOFError:
                found = {"verdict": None, "error": "its process died"}
            process.join()
            yield case, found
        for pipe, (case, process, since) in list(running.items()):
            if time.monotonic() - since > LIMIT:
                process.kill()
                del running[pipe]
                yield case, {"verdict": None, "error": f"not done after {LIMIT:.0f} s"}


def _ask(case: Case, parts: Sequence[str], pipe: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    found: dict[str, Any] = {"seconds": {}}
    try:
        if "judge" in parts:
            judged = judge(case)
            found |= {"verdict": judged.verdict, "error": judged.said}
        if {*ASKED[1:]} & {*parts}:
            with configured(case) as setup:
                for name, function in (("static", static), ("validate", validate), ("verify", verify)):
                    if name in parts:
                        began = time.monotonic()
                        found[name] = asdict(function(setup))
                        found["seconds"][name] = round(time.monotonic() - began, 1)
    except BaseException:
        found["error"] = found.get("error", "") + " THE SUITE FAILED: " + traceback.format_exc()[-600:]
    pipe.send(found)
    pipe.close()


if __name__ == "__main__":
    sys.exit(main())
