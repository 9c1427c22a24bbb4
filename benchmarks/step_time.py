"""Step time of the compiled plan against the same parallelism written by hand, side by side in the same
ranks.

    python benchmarks/step_time.py [--preset fsdp2_tp2] [--blocks 12] [--steps 4]

Both models live in the same processes and take turns, a block of steps each; the ratio is that of
neighbouring blocks. It is printed for the time on the clock, and for the processor time of all ranks, which
other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

import parallelizer as pz
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.losses import IGNORED
from parallelizer.runtime.launch import launcher as launch

CLIP = 1.0


def by_hand(model: nn.Module, mesh: Any) -> nn.Module:
    """What a person writes for a Llama-style model: tensor and sequence parallel, logits that stay sharded, then
    FSDP2 a block at a time.
    """
    tp = mesh["tp"]
    parallelize_module(
        model,
        tp,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.layers:
        parallelize_module(
            block,
            tp,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None, None),
                    desired_input_layouts=(Replicate(), None, None, None),
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def step_by_hand(model: nn.Module, batch: dict[str, torch.Tensor], optimizer: Any, group: Any) -> Any:
    """The same step in the plainest way: count tokens first, torch's loss over sharded logits, its own clipping."""
    optimizer.zero_grad(set_to_none=True)
    labels = batch["labels"].flatten()
    count = (labels != IGNORED).sum().float()
    dist.all_reduce(count, group=group)
    with loss_parallel():
        logits = model(batch["input_ids"]).flatten(0, 1)
        total = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").to_local()
        (total / count).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    mean = total.detach() / count
    dist.all_reduce(mean, group=group)
    return mean, norm.full_tensor()


Times = dict[str, list[float]]
"""By model, the seconds a step of each block."""


def rank(setup: Setup, blocks: int, steps: int) -> tuple[Times, Times, float]:
    """Time on the clock and this rank's processor time, and the difference of the last losses."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    mesh = pz.build_mesh(setup.mesh, "cpu")
    loss = setup.loss()
    ours = pz.apply(setup.compile(setup.build_model()), setup.build_model(), mesh)
    theirs = by_hand(setup.build_model(), mesh)
    for model in (ours, theirs):
        pz.materialize(model, device="cpu", seed=0)
    ours_optimizer, their_optimizer = setup.build_optimizer(ours), setup.build_optimizer(theirs)
    index, ranks = pz.batch_rank(mesh)
    rows = setup.workload.batch_size // ranks
    whole = setup.workload.example(setup.workload.batch_size, setup.workload.seq_len)
    batch = {k: v[index * rows : (index + 1) * rows] for k, v in whole.items()}
    group = mesh["dp_shard"].get_group()
    last: dict[str, float] = {}

    def compiled() -> None:
        last["ours"] = pz.train_step(ours, batch, loss, ours_optimizer, CLIP).loss.item()

    def manual() -> None:
        last["theirs"] = step_by_hand(theirs, batch, their_optimizer, group)[0].item()

    timed: Times = {"ours": [], "theirs": []}
    worked: Times = {"ours": [], "theirs": []}
    for block in range(blocks + 1):
        order: list[tuple[str, Callable[[], None]]] = [("ours", compiled), ("theirs", manual)]
        for name, run in order if block % 2 else reversed(order):
            dist.barrier()
            begun, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                run()
            if block:  # the first one warms up
                worked[name].append((time.process_time() - used) / steps)
                dist.barrier()
                timed[name].append((time.perf_counter() - begun) / steps)
    return timed, worked, abs(last["ours"] - last["theirs"])


def report(title: str, times: Times, blocks: int, steps: int) -> None:
    """Print medians, and the ratio with its quartiles."""
    ours, theirs = times["ours"], times["theirs"]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    print(
        f"{title}: compiled {statistics.median(ours) * 1e3:.1f} ms a step, "
        f"by hand {statistics.median(theirs) * 1e3:.1f} ms"
    )
    print(f"  ratio {median:.3f} (quartiles {low:.3f} to {high:.3f}, {blocks} blocks of {steps} steps)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="fsdp2_tp2")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config, origins = compose_config([f"parallel={arguments.preset}", "device=cpu"])
    setup = from_config(config, origins)
    blocks, steps = arguments.blocks, arguments.steps
    results = launch.start(rank, (setup, blocks, steps), ranks=setup.mesh.world_size, device="cpu")
    worked = {
        name: [sum(block) for block in zip(*(result[1][name] for result in results), strict=True)]
        for name in ("ours", "theirs")
    }
    report("on the clock", results[0][0], blocks, steps)
    report("processor time of all ranks", worked, blocks, steps)
    difference = max(result[2] for result in results)
    print(f"losses differ by {difference:.1e} at the end")


if __name__ == "__main__":
    main()
