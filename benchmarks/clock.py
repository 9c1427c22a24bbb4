"""The predicted time of a step against the real one, on this machine: `hardware=this` on 1 to 8 gloo ranks.

    python -m benchmarks.clock [--presets N] [--steps N]

Each configuration is traced, priced, and run: ranks start, take some steps, and report the median time of those behind the first
two. The machine has to be idle otherwise. Its own measurement is made first, if `.parallelizer/machine.json` is not there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.configuration.step_time import step_time
from parallelizer.mesh import build_mesh
from parallelizer.runtime.apply import apply
from parallelizer.runtime.initialize import materialize
from parallelizer.runtime.launch.launcher import start
from parallelizer.runtime.step import train_step
from parallelizer.simulate.record.trace import local_parts, trace

SMALL = ("model.dim=256", "train.seq_len=128")
LARGE = ("model.dim=512", "model.hidden_dim=1408", "train.seq_len=256")
PRESETS: tuple[tuple[str, tuple[str, ...]], ...] = tuple(
    (f"{preset} {size}", (f"parallel={preset}", *sizes, *more))
    for size, sizes in (("small", SMALL), ("large", LARGE))
    for preset, more in (
        ("single", ()),
        ("fsdp2", ()),
        ("fsdp4", ()),
        ("tp2", ()),
        ("tp4", ()),
        ("cp2", ()),
        ("cp4", ()),
        ("hsdp2x2", ()),
        ("fsdp2_tp2", ()),
        ("cp2_tp2", ()),
        ("fsdp2_cp2_tp2", ()),
    )
)
"""22 configurations, of one to eight ranks, each in two sizes."""


def main(arguments: list[str]) -> None:
    """Print the table, and the rank correlation and the median error on the last lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", type=int, default=len(PRESETS))
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = []
    for name, overrides in PRESETS[: options.presets]:
        setup = from_config(
            *compose_config([*overrides, "hardware=this", "device=cpu", "train.batch_size=8"])
        )
        predicted = _predicted(setup)
        seconds = step_seconds(setup, options.steps)
        found.append((predicted, seconds))
        print(f"{name:<22} {setup.mesh.world_size} ranks  predicted {predicted * 1e3:8.1f} ms  "
              f"took {seconds * 1e3:8.1f} ms  {100 * (predicted / seconds - 1):+6.1f} %", flush=True)  # fmt: skip
    errors = [abs(p / s - 1) for p, s in found]
    print(f"rank correlation: {correlation([p for p, _ in found], [s for _, s in found]):.3f}")
    print(f"median error: {100 * statistics.median(errors):.1f} %")


def step_seconds(setup: Setup, steps: int) -> float:
    """The median seconds of a step on the slowest rank: ranks start, and take the steps behind two that do not count."""
    return max(start(_measured, (setup, steps), ranks=setup.mesh.world_size, device="cpu"))


def _predicted(setup: Setup) -> float:
    model = setup.build_model()
    found = step_time(setup, trace(setup.compile(model), model, setup.recipe()))
    assert found is not None  # noqa: S101
    return found.seconds


def _measured(setup: Setup, steps: int) -> float:
    """The median seconds of a step on this rank."""
    torch.manual_seed(0)
    model = setup.build_model()
    program = setup.compile(model)
    mesh = build_mesh(program.mesh, "cpu")
    apply(program, model, mesh)
    materialize(model, device="cpu", seed=0)
    optimizer, loss = setup.build_optimizer(model), setup.loss()
    parts: Sequence[dict[str, Any]] = local_parts(setup.workload, program, mesh)
    times = []
    for _ in range(steps + 2):
        started = time.perf_counter()
        train_step(model, parts, loss, optimizer, setup.clip)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks of two lists."""
    x, y = ([sorted(values).index(v) for v in values] for values in (a, b))
    return statistics.correlation(x, y) if len(a) > 1 else 1.0


if __name__ == "__main__":
    main(sys.argv[1:])
