"""The predicted time of a step against the recipe's, on this machine: `hardware=this` on 1 to 8 gloo ranks.

    python -m benchmarks.clock [--presets N] [--only TEXT] [--steps N] [--every N]

Each configuration is traced, priced, and trained by `recipes.train`. What it took is the median of the steps behind the first two
in `metrics.jsonl`. The machine has to be idle otherwise. It is measured anew before every N configurations (10), because a
virtual machine does not keep its speed: what is compared was measured within some minutes. The output is the Markdown table of
docs/time.md.

The dry run takes the rows of experts to be balanced. The learning rate is next to nothing, because at the recipe's own the
routers of these small mixtures send most tokens to two experts after five steps. What is left is printed under the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
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
from parallelizer.simulate.record.trace import local_parts
from parallelizer.simulate.record.trace_classes import trace_classes
from parallelizer.simulate.time.measure import FILE, kept

LLAMA = ("model=llama_debug", "model.n_layers=4")
MIXTURE = ("model=hf_qwen3_moe",)
SIZES: dict[str, dict[tuple[str, ...], tuple[str, ...]]] = {
    "small": {
        LLAMA: ("model.dim=256", "train.seq_len=128"),
        MIXTURE: ("train.seq_len=128",),
    },
    "large": {
        LLAMA: ("model.dim=512", "model.hidden_dim=1408", "train.seq_len=256"),
        MIXTURE: (
            "model.config.hidden_size=512",
            "model.config.moe_intermediate_size=256",
            "train.seq_len=256",
        ),
    },
}
DENSE = (
    "single", "fsdp2", "fsdp4", "tp2", "tp4", "cp2", "cp4", "hsdp2x2", "fsdp2_tp2", "cp2_tp2", "fsdp2_cp2_tp2",
    "pp2", "pp4", "pp2_fsdp2", "pp2_tp2", "pp2_cp2", "pp2_fsdp2_tp2",
)  # fmt: skip
MIXED = ("fsdp2_ep2", "fsdp4_ep4", "fsdp2_ep4_tp2")
PRESETS: tuple[tuple[str, str, tuple[str, ...]], ...] = tuple(
    (preset, size, (f"parallel={preset}", *model, *sizes[model]))
    for size, sizes in SIZES.items()
    for model, presets in ((LLAMA, DENSE), (MIXTURE, MIXED))
    for preset in presets
)
"""20 presets of one to eight ranks, each in two sizes."""

PLAIN = ("train.batch_size=8", "train.prove=never", "train.compare=false", "train.check_every=0", "train.eval_batches=1",
         "train.checkpoint_every=0", "train.log_every=0", "optim.lr=1e-9")  # fmt: skip
WARM = 2


def main(arguments: list[str]) -> None:
    """Print the table, and the rank correlation and the median error on the last lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", type=int, default=len(PRESETS))
    parser.add_argument("--only", default="", help="presets with this in their name")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every", type=int, default=10, help="measure the machine before so many presets")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    machine = _measured_anew()
    print(
        f"{machine['name']}: measured in {machine['seconds']:.0f} s, before every {options.every} presets\n"
    )
    print("| preset | size | ranks | predicted | took | error |\n|---|---|---|---|---|---|")
    found = []
    busiest: dict[str, float] = {}
    chosen = [p for p in PRESETS if options.only in p[0]][: options.presets]
    for at, (preset, size, words) in enumerate(chosen):
        if at and at % options.every == 0:
            _measured_anew()
        overrides = [*words, *PLAIN, "hardware=this", "device=cpu"]
        setup = from_config(*compose_config(overrides))
        predicted = _predicted(setup)
        seconds, share = recipe_seconds(overrides, options.steps)
        found.append((predicted, seconds))
        if share:
            busiest[f"{preset} ({size})"] = share
        print(f"| `{preset}` | {size} | {setup.mesh.world_size} | {predicted * 1e3:,.0f} ms | {seconds * 1e3:,.0f} ms "
              f"| {100 * (predicted / seconds - 1):+.0f} % |", flush=True)  # fmt: skip
    if busiest:
        shares = ", ".join(f"{name} {share:.2f}" for name, share in busiest.items())
        print(f"\nrows of experts on the busiest rank, by the mean of all ranks: {shares}")
    errors = [abs(p / s - 1) for p, s in found]
    print(f"\nrank correlation: {correlation([p for p, _ in found], [s for _, s in found]):.3f}")
    print(f"median error: {100 * statistics.median(errors):.1f} %")


def _measured_anew() -> dict[str, Any]:
    """What `hardware=this` uses from now on."""
    FILE.unlink(missing_ok=True)
    return kept()


def recipe_seconds(overrides: Sequence[str], steps: int) -> tuple[float, float]:
    """The medians over the steps of the recipe, behind WARM that do not count: the seconds of a step, and the rows of experts on
    the busiest rank over the mean of all, 0 without experts.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "recipes.train",
            *overrides,
            f"train.steps={steps + WARM}",
            f"hydra.run.dir={folder}/run",
        ]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{ended.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    setup = from_config(*compose_config(overrides))
    tokens = setup.workload.batch_size * setup.workload.seq_len
    counted = [json.loads(line) for line in lines[WARM:]]
    seconds = statistics.median(tokens / one["tokens_per_second"] for one in counted)
    return seconds, statistics.median(one.get("experts_busiest_rank", 0.0) for one in counted)


def step_seconds(setup: Setup, steps: int) -> float:
    """The median seconds of a step on the slowest rank: ranks start, and take the steps behind two that do not count."""
    return max(start(_measured, (setup, steps), ranks=setup.mesh.world_size, device="cpu"))


def _predicted(setup: Setup) -> float:
    model = setup.build_model()
    found = step_time(setup, trace_classes(setup.compile(model), model, setup.recipe()))
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
