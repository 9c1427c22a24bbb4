"""Step time of a pipeline against the same stages written by hand on torch.distributed.pipelining, side by side in the same
ranks.

    python benchmarks/pipeline_step_time.py [--preset pp2] [--schedule 1f1b] [--blocks 16] [--steps 3] [key=value ...]

Both models live in the same processes and take turns, a block of steps each; the ratio is that of neighbouring blocks. The
losses of both are compared at the end.
"""

from __future__ import annotations

import argparse
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

import parallelizer as pz
from benchmarks.step_time import Times, report
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.losses import IGNORED
from parallelizer.runtime.launch import launcher as launch

CLIP = 1.0
SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Part(nn.Module):
    """Layers of a Llama, with the embedding in front on the first stage and the head behind on the last."""

    def __init__(self, whole: nn.Module, stage: int, stages: int) -> None:
        super().__init__()
        count = len(whole.layers)
        here = range(stage * count // stages, (stage + 1) * count // stages)
        self.rope = whole.rope
        self.layers = nn.ModuleDict({str(at): whole.layers[at] for at in here})
        self.tok_embeddings = whole.tok_embeddings if stage == 0 else None
        self.norm = whole.norm if stage == stages - 1 else None
        self.output = whole.output if stage == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rope(x.shape[1])
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return self.output(self.norm(x)) if self.output is not None else x


class ByHand:
    """A pipeline as a person writes it: one stage a rank, the mean over the tokens as the loss, clipping over all stages."""

    def __init__(self, setup: Setup, whole: nn.Module, rank: int, rows: int, microbatches: int) -> None:
        ranks = setup.mesh.world_size
        self.last = rank == ranks - 1
        self.first = rank == 0
        self.part = Part(whole, rank, ranks)
        self.optimizer = setup.build_optimizer(self.part)
        length, width = setup.workload.seq_len, whole.tok_embeddings.weight.shape[1]
        stream = torch.empty(rows // microbatches, length, width, requires_grad=True)
        ids = torch.empty(rows // microbatches, length, dtype=torch.int64)
        self.tokens = 1.0
        vocabulary = whole.output.weight.shape[0]
        logits = torch.empty(rows // microbatches, length, vocabulary, requires_grad=True)
        stage = PipelineStage(
            self.part,
            rank,
            ranks,
            torch.device("cpu"),
            input_args=(ids if self.first else stream,),
            output_args=(logits if self.last else stream,),
        )
        schedule = SCHEDULES[setup.pipeline.schedule if setup.pipeline else "1f1b"]
        self.schedule = schedule(stage, microbatches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / self.tokens

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens = float((batch["labels"] != IGNORED).sum())
        losses: list[torch.Tensor] = []
        args = (batch["input_ids"],) if self.first else ()
        given = {"target": batch["labels"], "losses": losses} if self.last else {}
        self.schedule.step(*args, **given)
        gradients = [p.grad for p in self.part.parameters() if p.grad is not None]
        seen = torch.stack([torch.nn.utils.get_total_norm(gradients) ** 2, sum(losses, torch.zeros(()))])
        dist.all_reduce(seen)
        nn.utils.clip_grads_with_norm_(self.part.parameters(), CLIP, seen[0].sqrt())
        self.optimizer.step()
        return seen[1].item()


def rank(setup: Setup, blocks: int, steps: int) -> tuple[Times, Times, float]:
    """Time on the clock and this rank's processor time in seconds a step, and the difference of the last losses."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = pz.build_mesh(setup.mesh, "cpu")
    loss, workload = setup.loss(), setup.workload
    pipeline = setup.pipeline.settled(setup.mesh.sizes["pp"])
    model = setup.build_model()
    ours = pz.apply(setup.compile(model), model, mesh)
    pz.materialize(ours, device="cpu", seed=0)
    whole = setup.build_model()
    pz.materialize(whole, device="cpu", seed=0)
    hand = ByHand(setup, whole, dist.get_rank(), workload.batch_size, pipeline.microbatches)
    optimizer = setup.build_optimizer(ours)
    batch = workload.example(workload.batch_size, workload.seq_len)
    last: dict[str, float] = {}

    def compiled() -> None:
        last["ours"] = pz.train_step(ours, batch, loss, optimizer, CLIP).loss.item()

    def manual() -> None:
        last["theirs"] = hand.step(batch)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="pp2", help="a preset with no axis but pp")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    preset = [f"parallel={arguments.preset}", f"parallel.pipeline.schedule={arguments.schedule}"]
    config, origins = compose_config([*preset, "device=cpu", *arguments.overrides])
    setup = from_config(config, origins)
    blocks, steps = arguments.blocks, arguments.steps
    results = launch.start(rank, (setup, blocks, steps), ranks=setup.mesh.world_size, device="cpu")
    worked = {
        name: [sum(block) for block in zip(*(result[1][name] for result in results), strict=True)]
        for name in ("ours", "theirs")
    }
    report("on the clock", results[0][0], blocks, steps)
    report("processor time of all ranks", worked, blocks, steps)
    print(f"losses differ by {max(result[2] for result in results):.1e} at the end")


if __name__ == "__main__":
    main()
