"""Time, processor time and memory of the dry run, as a whole process with imports, over depth and over ranks.

    python benchmarks/any_size.py [--layers 126] [--ranks 16384] [--pp 16] [--curve] [--clock] [--repeats 3]

The first line is Llama 3.1 405B on 16,384 ranks, if nothing else is said. `--pp` cuts it into so many stages under 1f1b, in the
place of context parallelism: 16 x dp_shard 128 x tp 8 are 16,384 ranks. `--curve` adds depths from 4 to 126 layers
and worlds from 64 to 16,384 ranks. `--clock` compares the dry run of a step on H100s with the same one whose time is
predicted too, in turns: by the clock on the wall, and by seconds of processors, which hold on a busy machine.
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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORLDS = {64: (4, 2, 8), 256: (16, 2, 8), 1024: (64, 2, 8), 4096: (256, 2, 8), 16384: (1024, 2, 8)}


class Run(NamedTuple):
    """Seconds of a command, those of all processors in it, and the largest resident set of any process in it in MB."""

    seconds: float
    processors: float
    memory: float


def measure(layers: int, world: int, *more: str, pp: int = 1) -> Run:
    """One dry run. With `pp`, each data rank has twice as many rows as there are stages, one for each microbatch."""
    shard, cp, tp = WORLDS[world]
    rows = shard
    if pp > 1:
        shard, cp = world // (pp * tp), 1
        rows = 2 * pp * shard
        more = (f"++parallel.mesh.pp={pp}", *(more or ("device=cpu",)))
    command = [
        *(
            sys.executable,
            "-m",
            "parallelizer",
            "plan",
            "--json",
            "model=llama3_405b",
            f"model.n_layers={layers}",
        ),
        *(
            "parallel=fsdp1024_cp2_tp8",
            f"parallel.mesh.dp_shard={shard}",
            f"parallel.mesh.cp={cp}",
            f"parallel.mesh.tp={tp}",
        ),
        *("train.seq_len=8192", f"train.batch_size={rows}", *(more or ("device=cpu",))),
    ]
    begun = time.perf_counter()
    pid = os.posix_spawn(
        sys.executable,
        command,
        {**os.environ, "PYTHONPATH": str(ROOT)},
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, used = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"the dry run ended with status {os.waitstatus_to_exitcode(status)}")
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return Run(
        time.perf_counter() - begun, used.ru_utime + used.ru_stime, max(used.ru_maxrss, children) / 1e3
    )


def clock(layers: int, world: int, repeats: int) -> None:
    """Print what predicting the time adds to a dry run, in alternating turns."""
    without, priced = [], []
    for _ in range(repeats):
        without.append(measure(layers, world, "device=cuda", "train.dtype=bfloat16"))
        priced.append(measure(layers, world, "hardware=h100"))
    for name, at in (("on the wall", 0), ("of processors", 1)):
        ratios = sorted(b[at] / a[at] for a, b in zip(without, priced, strict=True))
        before, after = (statistics.median(one[at] for one in runs) for runs in (without, priced))
        print(
            f"seconds {name}: without a clock {before:.2f}, with it {after:.2f}, "
            f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


def importing(repeats: int) -> float:
    """The seconds that `import torch` takes: what to compare machines by."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=126, help="of the model in the first line (126)")
    parser.add_argument("--ranks", type=int, choices=WORLDS, default=16384, help="of its world (16384)")
    parser.add_argument("--pp", type=int, default=1, help="stages (1), in the place of context parallelism")
    parser.add_argument("--curve", action="store_true", help="other depths and other worlds too")
    parser.add_argument("--clock", action="store_true", help="what predicting the time adds")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.pp > 1 and (arguments.curve or arguments.clock):
        parser.error("--pp goes with neither --curve nor --clock")
    if arguments.clock:
        return clock(arguments.layers, arguments.ranks, arguments.repeats)
    cases = [(arguments.layers, arguments.ranks)]
    if arguments.curve:
        cases += [(n, 16384) for n in (4, 8, 16, 32, 64)] + [(126, w) for w in WORLDS if w != 16384]
    print(f"`import torch` alone takes {importing(arguments.repeats):.1f} s here")
    print(f"{'layers':>6} {'ranks':>7} {'seconds (min to max)':>22} {'processor':>9} {'MB':>6}")
    for layers, world in cases:
        runs = [measure(layers, world, pp=arguments.pp) for _ in range(arguments.repeats)]
        times = sorted(run.seconds for run in runs)
        processor = statistics.median(run.processors for run in runs)
        memory = max(run.memory for run in runs)
        spread = f"{times[len(times) // 2]:.1f} ({times[0]:.1f} to {times[-1]:.1f})"
        print(f"{layers:>6} {world:>7,} {spread:>22} {processor:>9.1f} {memory:>6,.0f}", flush=True)


if __name__ == "__main__":
    main()
