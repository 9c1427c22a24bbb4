"""How long `validate` takes: the quick check against `import hydra`, and the full one, each as a new process.

    python benchmarks/validate_time.py [--repeats 15] [--full-repeats 3] [--only TEXT] [--slack 1]

The quick checks and `python -c 'import hydra'` run in turn, so that what else the machine does falls on all
alike; a ratio is that of the medians, its spread that of the ratios turn by turn. The full checks have goals:
8 s for the debug model, 30 s for Llama-3 405B on 16,384 ranks.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

HYDRA = ["-c", "import hydra"]
VALIDATE = ["-m", "parallelizer", "validate"]
QUICK = {
    "--quick configs/plans/llama.yaml": [*VALIDATE, "--quick", "configs/plans/llama.yaml"],
    "--quick plan=./configs/plans/llama.yaml": [*VALIDATE, "--quick", "plan=./configs/plans/llama.yaml"],
    "--quick parallel=fsdp1024_cp2_tp8": [*VALIDATE, "--quick", "parallel=fsdp1024_cp2_tp8"],
}
FULL = {
    "debug model, fsdp2_cp2_tp2": (8.0, [*VALIDATE, "parallel=fsdp2_cp2_tp2"]),
    "405B, 16,384 ranks": (
        30.0,
        [
            *VALIDATE,
            "model=llama3_405b",
            "parallel=fsdp1024_cp2_tp8",
            "train.batch_size=1024",
            "train.seq_len=8192",
        ],
    ),
}
GOAL = 3.0
"""How many times as long as `import hydra` the quick check may take."""


Time = tuple[float, float]
"""Seconds on the clock, and of processor time, which a busy machine stretches less."""


def timed(arguments: list[str]) -> Time:
    """A command of Python's from its start to its end, its children counted too. Raises when it fails."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    elapsed, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def medians(times: list[Time]) -> Time:
    """The medians of both clocks."""
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def row(name: str, times: list[Time], more: str = "") -> str:
    """A name with the median and the extremes of its times."""
    elapsed = [t[0] for t in times]
    clock, processor = medians(times)
    return f"{name:<42}{clock:7.2f} s  ({min(elapsed):.2f} to {max(elapsed):.2f})  {processor:6.2f} s{more}"


def main() -> int:
    """Measure in turns and print. Returns 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--full-repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="only checks whose name contains this")
    parser.add_argument(
        "--slack", type=float, default=1, help="how many times as long as its goal a check may take (1)"
    )
    options = parser.parse_args()
    missed = 0
    some = {name: arguments for name, arguments in QUICK.items() if options.only in name}
    full = {name: check for name, check in FULL.items() if options.only in f"full: {name}"}

    timed(HYDRA)  # once for nothing: files are read into memory, bytecode is written
    for arguments in some.values():
        timed(arguments)
    hydra: list[Time] = []
    quick: dict[str, list[Time]] = {name: [] for name in some}
    for _ in range(options.repeats):
        hydra.append(timed(HYDRA))
        for name, arguments in some.items():
            quick[name].append(timed(arguments))
    print(f"{os.cpu_count()} cores, {options.repeats} turns: median (extremes) on the clock, processor time")
    print(row("python -c 'import hydra'", hydra))
    for name, times in quick.items():
        clock, processor = (mine / base for mine, base in zip(medians(times), medians(hydra), strict=True))
        ratios = [mine[0] / base[0] for mine, base in zip(times, hydra, strict=True)]
        missed += clock > GOAL * options.slack
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(row(name, times, f"   {clock:.2f} x hydra ({spread}), {processor:.2f} x its processor time"))

    for name, (goal, arguments) in full.items():
        times = [timed(arguments) for _ in range(options.full_repeats)]
        missed += medians(times)[0] > goal * options.slack
        print(row(f"full: {name}", times, f"   goal {goal:.0f} s"))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
