"""The passes of a step through a pipeline: training, evaluation, and a forward for its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelizer.compiler.observe.phase import phase
from parallelizer.language.plan import Plan
from parallelizer.runtime.exception_notes import noted_loss
from parallelizer.runtime.loss_sums import loss_sums
from parallelizer.runtime.pipeline.execute import Batch, Execution
from parallelizer.runtime.pipeline.forms import TensorForm, filled, form_of
from parallelizer.runtime.pipeline.live import LivePipeline
from parallelizer.runtime.pipeline.microbatches import microbatches, rows_of
from parallelizer.styles.context_parallel.sequence import CurrentOrder
from parallelizer.styles.sharded_logits import taken_sharded
from parallelizer.torch_private import tree_leaves

Loss = Callable[..., Any]


class LossHead:
    """Takes the losses of the last stage's outputs. `sums` are those of all microbatches: the losses, and what they weigh,
    [2], in float32 at least; zeros on ranks without the last stage. Backward begins at the loss times `scale`.
    """

    def __init__(self, loss: Loss, scale: float, device: torch.device, dtype: torch.dtype) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self.loss, self.sums = loss, torch.zeros(2, dtype=wide, device=device)
        # One tensor for all microbatches: the backward of each would keep its own copy of a Python number.
        self.scale = torch.full((), scale, dtype=wide, device=device)

    def __call__(self, output: Any, batch: Batch) -> torch.Tensor | None:
        """The scaled loss of one microbatch; None without gradients."""
        with taken_sharded(output), phase("loss"), noted_loss(output):
            total, weight = loss_sums(self.loss, output, batch)
        self.sums = self.sums + torch.stack([t.detach().to(self.sums.dtype) for t in (total, weight)])
        return total * self.scale if torch.is_grad_enabled() else None


class OutputHead:
    """Keeps the last stage's outputs."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def __call__(self, output: Any, batch: Batch) -> None:
        """Keep one microbatch's output."""
        self.outputs.append(output)


def train_passes(
    pipeline: LivePipeline,
    plan: Plan,
    parts: Sequence[Batch],
    loss: Loss,
    scale: float,
    sequence: CurrentOrder,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Forward and backward of every part, each through the schedule. Returns the sums of this rank, as `accumulate` does.

    Raises ValueError where there is no part, or its rows cannot be cut into microbatches of equal size.
    """
    if not parts:
        raise ValueError("train_step was given no batch")
    head = LossHead(loss, scale, next(iter(parts[0].values())).device, dtype)
    for at, part in enumerate(parts):
        cut, order = pipeline.training(part, plan)
        Execution(pipeline, order, cut, head, sequence, part=at, reduces=at == len(parts) - 1).run()
    return head.sums if pipeline.is_last else head.sums + pipeline.elsewhere


def evaluate_passes(
    pipeline: LivePipeline,
    plan: Plan,
    batches: Iterable[Batch],
    loss: Loss,
    sequence: CurrentOrder,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The sums of losses over all batches, forward alone. Raises ValueError where there is no batch."""
    head: LossHead | None = None
    for batch in batches:
        head = head or LossHead(loss, 1.0, next(iter(batch.values())).device, dtype)
        cut = microbatches(batch, plan, gcd(rows_of(batch, plan), pipeline.stages.pipeline.microbatches or 1))
        Execution(pipeline, pipeline.forwards(len(cut)), cut, head, sequence, forwards=True).run()
    if head is None:
        raise ValueError("evaluate was given no batch")
    return head.sums


def forward_passes(pipeline: LivePipeline, batch: Batch, sequence: CurrentOrder) -> Any:
    """The model's output for a batch, on every rank: sent from the last stage's to the others. No gradient."""
    head = OutputHead()
    with torch.no_grad():
        Execution(pipeline, pipeline.forwards(1), [batch], head, sequence, forwards=True).run()
    [output] = head.outputs if pipeline.is_last else [None]
    return _on_every_stage(output, pipeline, next(iter(batch.values())).device)


def _on_every_stage(output: Any, pipeline: LivePipeline, device: torch.device) -> Any:
    """What the last stage's rank has, on all ranks of the pipeline: each tensor with the placements that it has there."""
    source = pipeline.world[pipeline.ranks[pipeline.last]]
    told = [form_of(output)]
    dist.broadcast_object_list(told, src=source, group=pipeline.group)
    mine = tree_leaves(output) if pipeline.is_last else []

    def sent(leaf: int, form: TensorForm) -> torch.Tensor:
        own = form.part(mine[leaf]) if mine else torch.empty(form.shape, dtype=form.dtype, device=device)
        dist.broadcast(own, src=source, group=pipeline.group)
        return form.wrapped(own, pipeline.mesh)

    return filled(told[0], sent)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of a model's parameters, which its losses have at least."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
