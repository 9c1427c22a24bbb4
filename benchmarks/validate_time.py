"""How long `validate` takes: the quick check against `import hydra`, and the full one, each as a new process.

    python benchmarks/validate_time.py [--repeats 15] [--full-repeats 3]

The quick checks and `python -c 'import hydra'` run in turn, so that what else the machine does falls on all
alike; a ratio is that of the medians, its spread that of the ratios turn by turn. The full checks have goals:
8 s for the debug model, 30 s for Llama-3 405B on 16,384 ranks.
"""

from __future__ import annotations

import argparse
import os
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


def seconds(arguments: list[str]) -> float:
    """Seconds of a command of Python's from its start to its end. Raises when it fails."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def row(name: str, values: list[float], more: str = "") -> str:
    """A name with the median and the extremes of its times."""
    return f"{name:<42}{statistics.median(values):7.2f} s  ({min(values):.2f} to {max(values):.2f}){more}"


def main() -> int:
    """Measure in turns and print. Returns 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--full-repeats", type=int, default=3)
    options = parser.parse_args()
    missed = 0

    seconds(HYDRA)  # once for nothing: files are read into memory, bytecode is written
    for arguments in QUICK.values():
        seconds(arguments)
    hydra: list[float] = []
    quick: dict[str, list[float]] = {name: [] for name in QUICK}
    for _ in range(options.repeats):
        hydra.append(seconds(HYDRA))
        for name, arguments in QUICK.items():
            quick[name].append(seconds(arguments))
    print(f"{os.cpu_count()} cores, {options.repeats} turns: median (extremes)")
    print(row("python -c 'import hydra'", hydra))
    for name, values in quick.items():
        ratio = statistics.median(values) / statistics.median(hydra)
        ratios = [mine / base for mine, base in zip(values, hydra, strict=True)]
        missed += ratio > GOAL
        print(row(name, values, f"   {ratio:.2f} x hydra ({min(ratios):.2f} to {max(ratios):.2f})"))

    for name, (goal, arguments) in FULL.items():
        values = [seconds(arguments) for _ in range(options.full_repeats)]
        missed += statistics.median(values) > goal
        print(row(f"full: {name}", values, f"   goal {goal:.0f} s"))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
