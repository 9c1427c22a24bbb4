"""What a checkpoint adds to the step in which it starts, and how long it is written beside the steps after it.

    python benchmarks/checkpoint.py [--preset fsdp2] [--dim 512] [--layers 4] [--rounds 12]

Steps with and without a save take turns in the same ranks. Of the step in which a save starts the call itself, which copies
the rank's part, is told apart from what the writing beside it takes. Processor time is scarce here: all cores compute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import parallelizer as pz
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.setup import Setup
from parallelizer.runtime.checkpoint.saving import Checkpoints
from parallelizer.runtime.launch import launcher as launch

Times = list[tuple[float, float, float, float]]
"""Of each round: a step alone, the call of save, the step with it, seconds of writing."""


def measure(setup: Setup, folder: str, rounds: int) -> tuple[Times, int]:
    """One rank's times, and the bytes that all ranks write together."""
    mesh = pz.build_mesh(setup.mesh, setup.device)
    model = pz.apply(setup.compile(setup.build_model()), setup.build_model(), mesh)
    pz.materialize(model, device=setup.device, seed=0)
    optimizer, loss = setup.build_optimizer(model), setup.loss()
    work = setup.workload
    tokens = torch.randint(
        0, 256, (work.batch_size, work.seq_len + 1), generator=torch.Generator().manual_seed(1)
    )
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    batch = pz.shard_batch(batch, setup.plan, mesh, device=setup.device)
    checkpoints = Checkpoints(folder, keep_last=1)

    def step() -> None:
        pz.train_step(model, batch, loss, optimizer, setup.clip)

    step()
    times: Times = []
    for number in range(rounds + 1):
        dist.barrier()
        begun = time.perf_counter()
        step()
        alone = time.perf_counter() - begun
        dist.barrier()
        begun = time.perf_counter()
        checkpoints.save(number, model, optimizer)
        call = time.perf_counter() - begun
        step()
        beside = time.perf_counter() - begun
        checkpoints.wait()
        (ended,) = checkpoints.ended()
        if ended.failure is not None:
            raise OSError(ended.failure.message)
        if number:  # the first save gets the memory that the others use again
            times.append((alone, call, beside, ended.seconds))
    size = sum(f.stat().st_size for f in (Path(folder) / f"step_{rounds}").iterdir())
    return times, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="fsdp2")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = [f"model.dim={arguments.dim}", f"model.n_layers={arguments.layers}"]
    setup = pz.from_config(*compose_config([f"parallel={arguments.preset}", *size]))
    with tempfile.TemporaryDirectory() as folder:
        found = launch.start(
            measure, (setup, folder, arguments.rounds), ranks=setup.mesh.world_size, device="cpu"
        )
    turns = zip(*(times for times, _ in found), strict=True)
    slowest = [[max(column) for column in zip(*turn, strict=True)] for turn in turns]
    alone, _, _, written = (statistics.median(column) for column in zip(*slowest, strict=True))
    print(f"{arguments.preset}, {found[0][1] / 2**20:,.0f} MiB a checkpoint, {arguments.rounds} rounds")
    print(f"a step alone {alone:.2f} s, a checkpoint written in {written:.2f} s")
    for name, values in {
        "the call of save": [100 * call / alone for alone, call, _, _ in slowest],
        "the step in which it starts": [100 * (beside / alone - 1) for alone, _, beside, _ in slowest],
    }.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name}: {middle:+.1f} % of a step (quartiles {low:+.1f} to {high:+.1f})")


if __name__ == "__main__":
    main()
