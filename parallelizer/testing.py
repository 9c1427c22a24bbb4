"""One line for anybody's test suite: this model under this plan computes what it computes on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from parallelizer.language.load import load_plan
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import BATCH_AXES, Mesh, Plan
from parallelizer.language.workload import Workload
from parallelizer.runtime.step import Loss

if TYPE_CHECKING:
    from parallelizer.proof.proof import Proof
    from parallelizer.runtime.initialize import Initializer

Batch = Mapping[str, torch.Tensor]


def assert_equivalent(
    build: Callable[[], nn.Module],
    plan: Plan | str | Path,
    mesh: Mapping[str, int],
    *,
    loss: Loss,
    batch: Batch | Callable[[int], Batch] | None = None,
    workload: Workload | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    clip: float | None = 1.0,
    accumulate: int = 1,
    initializer: Initializer | None = None,
    pipeline: Pipeline | None = None,
    seed: int = 0,
    force: bool = False,
) -> Proof:
    """Run a model for two optimizer steps in float64, on one process and under the plan on CPU ranks, and
    compare everything.

    `build()` returns the model, the same on every call: on meta, to be initialised by `initializer` or its
    modules' `reset_parameters()`, or with values of its own. `plan` is a plan, its name or its path; `mesh`
    has the sizes of axes. The whole batch is given as tensors with rows along dimension 0, as a function from
    a step's seed to such tensors, or described by a `workload`. `loss(output, batch)` returns the sum of the
    losses and what they weigh, the number of tokens, say. A mesh with an axis `pp` needs a workload; `pipeline` has its
    schedule and the numbers of that, 1F1B's without it.

    The process forks, so it must have no process group; one that has used CUDA starts new processes
    instead, for which all arguments must pickle. Returns the proof. Raises AssertionError with the
    report when the runs differ; PlanError when the plan is refused, unless `force`, when the unsharded run
    gives no numbers, or a module's forward fails on a rank; LaunchError when a rank fails otherwise;
    ValueError when no batch is given, or its rows cannot be dealt out.
    """
    from parallelizer.proof.prove import prove_subject
    from parallelizer.proof.subject import Subject
    from parallelizer.report.text.proof import text
    from parallelizer.styles.experts.stack import stack_experts

    sizes, loaded = Mesh(mesh), plan if isinstance(plan, Plan) else load_plan(str(plan))
    batches, rows, tokens = _batches(batch, workload, seed)
    ranks = sizes.size(*BATCH_AXES) * accumulate
    if rows % ranks:
        raise ValueError(
            f"{rows} rows cannot be dealt out evenly to {ranks} parts (data ranks times accumulated parts)"
        )
    subject = Subject(
        plan=loaded,
        mesh=sizes,
        build=_as_built(lambda: stack_experts(build(), loaded)),
        loss=loss,
        optimizer=optimizer or _adamw,
        batch=batches,
        rows=rows,
        seq_len=tokens,
        accumulate=accumulate,
        clip=clip,
        initializer=initializer,
        workload=workload,
        pipeline=pipeline,
    )
    proof = prove_subject(subject, seed=seed, force=force)
    if not proof.passed:
        raise AssertionError(text(proof))
    return proof


def _as_built(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Built once: forked processes have the same values then, however `build` draws them."""
    return functools.partial(_same, build())


def _same(model: nn.Module) -> nn.Module:
    return model


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def _batches(
    batch: Batch | Callable[[int], Batch] | None, workload: Workload | None, seed: int
) -> tuple[Callable[[int], dict[str, torch.Tensor]], int, int]:
    """The batch of a step by its seed, its rows, and the length of its sequences."""
    if batch is None:
        if workload is None:
            raise ValueError("assert_equivalent needs a batch or a workload")
        from parallelizer.proof.tiny import proof_batch

        return functools.partial(proof_batch, workload), workload.batch_size, workload.seq_len
    if callable(batch):
        function = batch
        return functools.partial(_called, function), *_rows_and_tokens(function(seed))
    fixed = dict(batch)
    return functools.partial(_rolled, fixed, seed), *_rows_and_tokens(fixed)


def _rows_and_tokens(batch: Batch) -> tuple[int, int]:
    """Of the first entry that has rows."""
    first = next((tensor for tensor in batch.values() if tensor.ndim), None)
    if first is None:
        raise ValueError(
            "no entry of the batch has rows: at least one tensor needs a dim 0 with a row for each sequence"
        )
    return first.shape[0], first.shape[1] if first.ndim > 1 else 1


def _called(function: Callable[[int], Batch], seed: int) -> dict[str, torch.Tensor]:
    return dict(function(seed))


def _rolled(batch: Batch, first: int, seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.roll(seed - first, 0) if tensor.ndim else tensor for name, tensor in batch.items()}
