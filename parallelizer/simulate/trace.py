"""One training step of the compiled program on a fake world, recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelizer.applier import apply
from parallelizer.compiler import Program
from parallelizer.context.buffers import shard_batch
from parallelizer.mesh import build_mesh
from parallelizer.simulate.ledger import Entry, Ledger
from parallelizer.simulate.memory import MemoryTracker, Usage, usage
from parallelizer.simulate.modules import Running
from parallelizer.simulate.world import enter_fake_world
from parallelizer.step import Loss, train_step
from parallelizer.workload import Workload

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Recipe:
    """What a step needs beside the program: what is fed, the loss, the optimizer, and the bound of the gradient norm."""

    workload: Workload
    loss: Loss
    optimizer: OptimizerFactory
    clip: float | None


@dataclass(frozen=True)
class Trace:
    """The collectives of one step in order, and the memory over it, of one rank."""

    rank: int
    ledger: tuple[Entry, ...]
    memory: Usage


def trace(program: Program, model: nn.Module, recipe: Recipe, rank: int = 0, *, real: bool = False) -> Trace:
    """Run two steps as `rank` of the program's world and record the second, when optimizer states exist.

    `model` is on meta and is used up. Enters a fake world in this process: call it through `world.in_child`. With `real` the
    tensors are real ones on the CPU, for measuring what is otherwise predicted.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mesh_sizes = program.mesh
    enter_fake_world(mesh_sizes.world_size, rank)
    mesh = build_mesh(mesh_sizes, "cpu")
    apply(program, model, mesh)
    running = Running(model)
    ledger, memory = Ledger(program, mesh, running), MemoryTracker(running)
    ledger.label(model)
    from contextlib import nullcontext

    world: Any = nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
    with world:
        model.to_empty(device="cpu")
        memory.adopt(model.parameters(), "parameters")
        memory.adopt(model.buffers(), "buffers")
        optimizer = recipe.optimizer(model)
        parts = local_parts(recipe.workload, program, mesh)
        with memory:
            for part in parts:
                memory.adopt(part.values(), "batch")
            train_step(model, parts, recipe.loss, optimizer, recipe.clip)
            _label(memory, model, optimizer)
            running.restart()
            start = len(memory.events)
            with ledger:
                train_step(model, parts, recipe.loss, optimizer, recipe.clip)
            _label(memory, model, optimizer)
    return Trace(rank, tuple(ledger.entries), usage(memory.events, start))


def local_parts(workload: Workload, program: Program, mesh: Any) -> list[dict[str, torch.Tensor]]:
    """What one rank is fed in a step: its rows, in the parts that gradients are accumulated over."""
    ranks = program.mesh.size("dp_replicate", "dp_shard")
    rows = max(1, workload.batch_size // workload.accumulate // ranks)
    parts = []
    for index in range(workload.accumulate):
        whole = workload.example(rows, workload.seq_len, "cpu", seed=index)
        parts.append(shard_batch(whole, program.plan, mesh))
    return parts


def _label(memory: MemoryTracker, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    memory.adopt([p.grad for p in model.parameters() if p.grad is not None], "gradients")
    for state in optimizer.state.values():
        memory.adopt([t for t in state.values() if isinstance(t, torch.Tensor)], "optimizer")
