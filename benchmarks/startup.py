"""From the command to the end of the first all-reduce on 16 ranks: `launch.start` against torchrun.

    python benchmarks/startup.py [--ranks 16] [--repeats 3] [--recipe "python -m recipes.train ..."]

Both run the same script, in turn, each time as a new process with all its imports. The clock starts before
the command does and stops when the last rank has done its all-reduce. `--recipe` times a command of your own
(give it `train.steps=1`) from its start to its end, in the same turns.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, sys, time

import torch
import torch.distributed as dist

from parallelizer.runtime.launch.outside import join, outside_ranks
from parallelizer.runtime.launch.launcher import start


def worker(folder):
    dist.all_reduce(torch.ones(1))
    with open(os.path.join(folder, str(dist.get_rank())), "w") as file:
        file.write(repr(time.time()))


if __name__ == "__main__":
    if outside_ranks():
        join(worker, (sys.argv[1],), device="cpu")
    else:
        start(worker, (sys.argv[1],), ranks=int(sys.argv[2]), device="cpu")
"""


def to_first_all_reduce(command: list[str], ranks: int) -> float:
    """Seconds from before `command <folder> <ranks>` to the end of the last rank's first all-reduce."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        subprocess.run([*command, folder, str(ranks)], check=True, stderr=subprocess.DEVNULL)
        ends = [float(path.read_text()) for path in Path(folder).iterdir()]
    if len(ends) != ranks:
        raise RuntimeError(f"{len(ends)} of {ranks} ranks reported")
    return max(ends) - begin


def whole(command: list[str]) -> float:
    """Seconds that a command takes from start to end."""
    begin = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.time() - begin


def row(name: str, seconds: list[float]) -> str:
    """A name with the median and the extremes of its times."""
    return f"{name:<34}{statistics.median(seconds):8.2f} s   ({min(seconds):.2f} to {max(seconds):.2f})"


def main() -> None:
    """Measure in turns, and print medians, extremes and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--recipe", action="append", default=[], metavar="COMMAND")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first_all_reduce.py"
        script.write_text(SCRIPT)
        ours = [sys.executable, str(script)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(options.ranks), str(script)]
        a: list[float] = []
        b: list[float] = []
        recipes: dict[str, list[float]] = {command: [] for command in options.recipe}
        for turn in range(options.repeats):
            a.append(to_first_all_reduce(ours, options.ranks))
            b.append(to_first_all_reduce(torchrun, options.ranks))
            for command, seconds in recipes.items():
                seconds.append(whole(shlex.split(command)))
            print(f"turn {turn + 1}: {a[-1]:.2f} s, torchrun {b[-1]:.2f} s", file=sys.stderr)

    print(f"{options.ranks} ranks on {os.cpu_count()} cores, {options.repeats} turns, median (extremes)")
    print(row("parallelizer.runtime.launch.launcher.start", a))
    print(row("torchrun --standalone", b))
    ratios = sorted(theirs / mine for mine, theirs in zip(a, b, strict=True))
    ratio = statistics.median(b) / statistics.median(a)
    print(f"{'torchrun / start':<34}{ratio:8.1f}     ({ratios[0]:.1f} to {ratios[-1]:.1f} turn by turn)")
    for command, seconds in recipes.items():
        print(row(command, seconds))


if __name__ == "__main__":
    main()
