"""One training step, the same for the recipe, the dry run and the proof, and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelizer.compiler.observe.calling import call, outcome
from parallelizer.compiler.observe.phase import phase
from parallelizer.runtime.arriving import Arriving
from parallelizer.runtime.eval_mode import eval_mode
from parallelizer.runtime.exception_notes import noted_backward, noted_loss
from parallelizer.runtime.found_inf import step_unless, takes_found_inf
from parallelizer.runtime.gradients import clip_factor, grad_norm, scale_, sum_partial
from parallelizer.runtime.loss_sums import loss_sums
from parallelizer.runtime.pipeline import progress
from parallelizer.runtime.pipeline.live import LivePipeline
from parallelizer.runtime.pipeline.passes import dtype_of, evaluate_passes, forward_passes, train_passes
from parallelizer.runtime.pipeline.shared_gradients import counted, sum_shared
from parallelizer.runtime.random_state import RandomState
from parallelizer.runtime.redistribution import redistribute
from parallelizer.runtime.state import (
    ParallelState,
    device_of,
    every_group,
    kept_buffers,
    refuse_added_parameters,
    refuse_replaced_parameters,
    restore_buffers,
    state_of,
)
from parallelizer.runtime.taken_step import Skipped, Step, StepNumbers
from parallelizer.runtime.unknown_id import unknown_id
from parallelizer.styles.context_parallel.to_device import to_device
from parallelizer.styles.fsdp_partial import summed_behind
from parallelizer.styles.sharded_logits import taken_sharded

Batch = Mapping[str, torch.Tensor]
Loss = Callable[[torch.Tensor, Batch], tuple[torch.Tensor, torch.Tensor | float]]
"""From the model's output and the batch to (sum of the local tokens' losses, what they weigh: their
number, which may be a plain number). Where a plan leaves the output sharded, a DTensor, `F.cross_entropy` takes it as it is.
"""


SCALE = 2.0**-12
"""What losses are scaled by before backward. The exact divisor, the number of valid tokens of all ranks, is
known only after the last part; a power of two costs no rounding and keeps gradients near their final size,
whatever the dtype they travel in.
"""


def train_step(
    model: nn.Module,
    batch: Batch | Sequence[Batch],
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    clip: float | None = None,
    *,
    skip_nonfinite: bool = False,
    words: torch.Tensor | None = None,
    after: Step | None = None,
) -> Step:
    """Forward, backward, clipping and one optimizer step, without reading a value back to the host.

    `batch` is this rank's part of the global batch, or a list of its parts over which gradients are
    accumulated. The loss is the mean over the valid tokens of the whole global batch: the losses are
    summed, gradients and token counts are summed over the data ranks, and the division happens once,
    together with clipping. `clip` bounds the gradient norm; None disables clipping. Gradients are freed
    before the step begins, and kept after it. Raises PlanError for parameters that were added to a parallel
    model, and ValueError for an optimizer that was built before the model was made parallel.

    With `skip_nonfinite`, if the loss or the gradient norm is NaN or infinite on any rank, no rank applies
    the step: parameters, persistent buffers and the optimizer keep their exact values, and `Step.skipped`
    is set. The gradients are those of backward, times `SCALE`, neither clipped nor divided. Random states
    have advanced. This costs one all-reduce of a number over the model's ranks, and a copy of the persistent
    buffers. The device decides where the optimizer takes `found_inf`, as torch's do with `fused=True` once
    they have states and no hooks: `optimizer.step()` is called, and changes nothing. For any other optimizer,
    and in its first step, the host reads one value before it.

    A loop that reads a `Step` while the device computes the next one passes the earlier step as `after`: if it was not
    applied, this one is not either, and has `Step.skipped.follows`. Parameters, buffers and the optimizer are then as
    they were before the step that was not finite, although it is found one step late. Do not pass a step that was read
    already: if it was left out, every later step would be left out too. `after` needs `skip_nonfinite`; without it
    ValueError is raised.

    `words`, whole numbers that ranks tell each other, travel with this all-reduce: `Step.words` has the
    greatest of each over all ranks. It is None without `skip_nonfinite`, and where the model does not have
    the whole world.
    """
    if after is not None and not (skip_nonfinite and after.left_out is not None):
        raise ValueError("train_step(after=) needs skip_nonfinite=True, in this step and in the one before")
    parts: Sequence[Batch] = [batch] if isinstance(batch, Mapping) else batch
    with redistribute(_redistribution(model)):
        return _train_step(model, parts, loss, optimizer, clip, skip_nonfinite, words, after)


def accumulate(model: nn.Module, parts: Sequence[Batch], loss: Loss) -> torch.Tensor:
    """Forward and backward of every part, gradients summed, times `SCALE`. Returns this rank's sums of losses and of
    what they weigh, [2], in float32 at least. Raises ValueError where there is no part.
    """
    state = state_of(model)
    if state is not None and state.pipeline is not None:
        sequence, dtype = state.buffers.sequence, dtype_of(model)
        return train_passes(state.pipeline, state.program.plan, parts, loss, SCALE, sequence, dtype)
    totals: torch.Tensor | None = None
    for at, part in enumerate(parts):
        progress.tell((at, None))
        with phase("forward"):
            output = outcome_for_loss(model, part)
        with taken_sharded(output):
            with phase("loss"), noted_loss(output):
                total, weight = loss_sums(loss, output, part)
            del output
            with phase("backward"), noted_backward():
                (total * SCALE).backward()
        sums = torch.stack([total.detach().to(_wide(total)), weight.detach().to(_wide(total))])
        totals = sums if totals is None else totals + sums
    if totals is None:
        raise ValueError("train_step was given no batch")
    return totals


def _train_step(
    model: nn.Module,
    parts: Sequence[Batch],
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    clip: float | None,
    skip_nonfinite: bool,
    words: torch.Tensor | None,
    after: Step | None,
) -> Step:
    refuse_added_parameters(model)
    refuse_replaced_parameters(model, optimizer)
    state = state_of(model)
    pipeline = None if state is None else state.pipeline
    groups = () if state is None else state.sum_groups
    optimizer.zero_grad(set_to_none=True)
    if skip_nonfinite:
        random, put_back = RandomState.now(device_of(model)), kept_buffers(model)
    with summed_behind():
        totals = accumulate(model, parts, loss)
    local = totals.clone() if skip_nonfinite else totals
    with phase("loss"):
        for group in groups:
            dist.all_reduce(totals, group=group)
    with phase("clip"):
        parameters = [p for p in model.parameters() if p.requires_grad]
        sum_partial(parameters)
        if pipeline is not None:
            sum_shared(model, pipeline)
        mean = totals[0] / totals[1]
        correction = 1.0 / (SCALE * totals[1])
        stages = None if pipeline is None else pipeline.group
        norm = grad_norm(counted(model, pipeline), stages) * correction
        factor = correction * clip_factor(norm, clip) if clip is not None else correction
    if not skip_nonfinite:
        with phase("clip"):
            scale_(parameters, factor)
        with phase("optimizer"):
            optimizer.step()
        restore_buffers(model)
        return Step(mean, norm)
    told, left_out, count = _told_everywhere(model, mean, norm, words=words, after=after)
    kinds = mean.dtype, norm.dtype

    def numbers(read: Sequence[int]) -> StepNumbers:
        return _numbers(read, kinds, count, Skipped(local, random))

    if takes_found_inf(optimizer, left_out.device):
        arriving = Arriving(told)
        with phase("clip"):
            scale_(parameters, factor.masked_fill(left_out.to(factor.device) != 0, 1.0))
        with phase("optimizer"):
            step_unless(left_out, optimizer)
        put_back(left_out)
        return Step.unread(lambda: numbers(arriving.tolist()), left_out)
    known = numbers(told.tolist())
    if known.skipped is not None:
        put_back(None)
    else:
        with phase("clip"):
            scale_(parameters, factor)
        with phase("optimizer"):
            optimizer.step()
        restore_buffers(model)
    return Step.unread(lambda: known, left_out)


def _told_everywhere(
    model: nn.Module,
    mean: torch.Tensor,
    norm: torch.Tensor,
    *,
    words: torch.Tensor | None,
    after: Step | None,
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """Everything that is to be read of a step, in one tensor for `_numbers`; whether it is left out, a float32 scalar, 1 or 0;
    and how many words the tensor ends with.

    Every rank's word counts. The numbers are sums over the axes that deal out tokens and parameters; what all ranks of
    a tensor axis compute alike, the loss above all, one of them may have wrong alone.
    """
    device = device_of(model)  # gradients of offloaded parameters, and their norm, lie on the CPU
    groups = every_group(model)
    own = torch.stack([n.to(device, torch.float64) for n in (mean, norm)])
    bad = ~torch.isfinite(own)
    told = bad.float()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if words is not None and world > 1 and groups != (dist.group.WORLD,):
        words = None
    if words is not None:
        told = torch.cat([bad.to(words.dtype), to_device(words, device)])
    for group in groups:
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    left_out = told[:2].amax().float()
    if after is not None and after.left_out is not None:
        left_out = torch.maximum(left_out, after.left_out)
    # As bits: words have more digits than a float64 holds.
    every = torch.cat([own.view(torch.int64), left_out.long().view(1), told.long()])
    return every, left_out, None if words is None else len(words)


def _numbers(
    read: Sequence[int], kinds: tuple[torch.dtype, torch.dtype], words: int | None, skipped: Skipped
) -> StepNumbers:
    """The numbers of a step from what `_told_everywhere` has put together. Those of the tensors are on the CPU."""
    values = torch.tensor(read[:2], dtype=torch.int64).view(torch.float64)
    left_out, *told = read[2:]
    finite = [not one for one in told[:2]]
    loss, norm = (_unless(good, v.to(kind)) for good, v, kind in zip(finite, values, kinds, strict=True))
    why = replace(skipped, follows=all(finite)) if left_out else None
    return StepNumbers(loss, norm, why, None if words is None else tuple(map(int, told[2:])))


def _unless(finite: bool, number: torch.Tensor) -> torch.Tensor:
    """The number, or a NaN where another rank's is not finite and this one's is."""
    return number if finite or not bool(torch.isfinite(number)) else torch.full_like(number, torch.nan)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> torch.Tensor:
    """The mean loss over the valid tokens of all batches and data ranks. The model is in eval mode during
    the call; afterwards each module is in the mode that it was in.
    """
    try:
        with eval_mode(model):
            return _evaluated(model, batches, loss)
    finally:
        restore_buffers(model)


def _evaluated(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> torch.Tensor:
    state = state_of(model)
    if state is not None and state.pipeline is not None:
        return _evaluate_stages(model, state, state.pipeline, batches, loss)
    totals: torch.Tensor | None = None
    for batch in batches:
        output = outcome_for_loss(model, batch)
        with taken_sharded(output), noted_loss(output):
            total, weight = loss_sums(loss, output, batch)
        del output
        sums = torch.stack([total.to(_wide(total)), weight.to(_wide(total))])
        totals = sums if totals is None else totals + sums
    if totals is None:
        raise ValueError("evaluate was given no batch")
    for group in data_groups(model):
        dist.all_reduce(totals, group=group)
    return totals[0] / totals[1]


def _evaluate_stages(
    model: nn.Module,
    state: ParallelState,
    pipeline: LivePipeline,
    batches: Iterable[Batch],
    loss: Loss,
) -> torch.Tensor:
    """The mean loss of a model that is cut into stages."""
    plan, sequence = state.program.plan, state.buffers.sequence
    with redistribute(state.program.redistribute):
        totals = evaluate_passes(pipeline, plan, batches, loss, sequence, dtype_of(model))
    for group in state.sum_groups:
        dist.all_reduce(totals, group=group)
    return totals[0] / totals[1]


def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's output for the batch entries that its forward takes; of a transformers model the logits. A model that is
    cut into stages gives it on every rank, without a gradient.
    """
    state = state_of(model)
    if state is not None and state.pipeline is not None:
        with redistribute(state.program.redistribute):
            found: torch.Tensor = forward_passes(state.pipeline, batch, state.buffers.sequence)
        return found
    with redistribute(_redistribution(model)):
        logits: torch.Tensor = call(model, batch)
    return logits


def data_groups(model: nn.Module) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks saw different tokens, for a parallel model; none for any other."""
    state = state_of(model)
    return () if state is None else state.data_groups


def outcome_for_loss(model: nn.Module, batch: Batch) -> Any:
    """What a loss is given: the logits, as `forward` has them, or a `Routed` around them. On a CPU, raises PlanError
    `data-mismatch` for an id that an embedding has no row for.
    """
    with redistribute(_redistribution(model)):
        try:
            return outcome(model, batch)
        except IndexError as error:
            if unknown := unknown_id(error, model, batch):
                raise unknown from error
            raise


def _redistribution(model: nn.Module) -> str:
    state = state_of(model)
    return "greedy" if state is None else state.program.redistribute


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
