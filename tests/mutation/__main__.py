"""`python -m tests.mutation`: the table of the mutation suite, and with --write the page that has it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.proofs.markdown import replace_between
from tests.mutation.generate import KINDS, mutants
from tests.mutation.judge import Judge, Verdict
from tests.mutation.sources import sources
from tests.mutation.table import MARKER, markdown, wrong
from tests.mutation.tree import write_tree


def main() -> int:
    """Judge the mutants that the command line asks for, and print the table. 1 when something slips through."""
    arguments = _arguments()
    judge = Judge(arguments.cache)
    started, verdicts, unknown = time.perf_counter(), list[Verdict](), 0
    for source in sources():
        if arguments.plan and source.name not in arguments.plan:
            continue
        original = write_tree(source.tree)
        for mutant in mutants(source, arguments.seed):
            if arguments.kind and not any(k in mutant.kind for k in arguments.kind):
                continue
            verdict = judge.known(mutant) if arguments.known else judge.judge(mutant, original)
            if verdict is None:
                unknown += 1
                continue
            verdicts.append(verdict)
            _progress(verdict)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    command = shlex.join(["python", "-m", "tests.mutation", *_plan_of_the_run(arguments)])
    text = markdown(verdicts, command, time.perf_counter() - started)
    if unknown:
        text = f"{unknown:,} mutants were not judged and are left out.\n\n{text}"
    print(text)
    if arguments.write:
        replace_between(arguments.write, MARKER, text)
    return 1 if wrong(verdicts) else 0


def _plan_of_the_run(arguments: argparse.Namespace) -> list[str]:
    """The options that choose mutants."""
    chosen = [f"--plan={p}" for p in arguments.plan or ()] + [f"--kind={k}" for k in arguments.kind or ()]
    chosen += ["--known"] if arguments.known else []
    return chosen + ([f"--seed={arguments.seed}"] if arguments.seed else [])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests.mutation", description=__doc__)
    parser.add_argument("--plan", action="append", help="only this plan (again for more)")
    parser.add_argument(
        "--kind", action="append", help=f"only kinds with this in their name: {', '.join(KINDS)}"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the letters (0)")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/parallelizer-mutants"),
                        help="where verdicts are kept (%(default)s)")  # fmt: skip
    parser.add_argument(
        "--known", action="store_true", help="judge nothing anew: leave out what the cache has not"
    )
    parser.add_argument("--json", type=Path, help="write every verdict there")
    parser.add_argument("--write", metavar="PAGE", help="the page to write the table into")
    return parser.parse_args()


def _progress(verdict: Verdict) -> None:
    mutant = verdict.mutant
    harm, said = verdict.harm.wrong or "harmless", ", ".join(verdict.codes) or "accepted"
    mark = "" if verdict.harmful == verdict.refused else "*** "
    print(f"{mark}[{mutant.plan} {mutant.preset}] {mutant.kind}: {mutant.name}: {said} | {harm}", file=sys.stderr,
          flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
