"""One training step, the same for the recipe, the dry run and the proof, and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from parallelizer.gradients import clip_factor, grad_norm, scale_, sum_partial
from parallelizer.hugging_face.recognise import inputs_of, logits_of
from parallelizer.notes import noted_backward, noted_loss
from parallelizer.phase import phase
from parallelizer.redistribution import redistribute
from parallelizer.state import refuse_added_parameters, restore_buffers, state_of
from parallelizer.vocabulary import plain, taken_sharded

Batch = Mapping[str, torch.Tensor]
Loss = Callable[[torch.Tensor, Batch], tuple[torch.Tensor, torch.Tensor]]
"""From the model's output and the batch to (sum of the local tokens' losses, what they weigh: their
number). Where a plan leaves the output sharded, a DTensor, `F.cross_entropy` takes it as it is.
"""


SCALE = 2.0**-12
"""What losses are scaled by before backward. The exact divisor, the number of valid tokens of all ranks, is
known only after the last part; a power of two costs no rounding and keeps gradients near their final size,
whatever the dtype they travel in.
"""


@dataclass(frozen=True)
class Step:
    """What a step computed: scalar tensors, the same on every rank; read them when you log."""

    loss: torch.Tensor
    grad_norm: torch.Tensor


def train_step(
    model: nn.Module,
    batch: Batch | Sequence[Batch],
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    clip: float | None = None,
) -> Step:
    """Forward, backward, clipping and one optimizer step, without reading anything back to the host.

    `batch` is this rank's part of the global batch, or the parts of it that gradients are accumulated over.
    The loss is the mean over the valid tokens of the whole global batch: local sums are weighed, gradients
    and token counts are summed over the data ranks, and the division happens once, together with clipping.
    `clip` bounds the gradient norm; None leaves gradients alone. Gradients are freed before the step begins,
    and kept after it for whoever wants to look. Raises PlanError for parameters that were added to a parallel model.
    """
    parts: Sequence[Batch] = [batch] if isinstance(batch, Mapping) else batch
    with redistribute(_redistribution(model)):
        return _train_step(model, parts, loss, optimizer, clip)


def _train_step(
    model: nn.Module,
    parts: Sequence[Batch],
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    clip: float | None,
) -> Step:
    refuse_added_parameters(model)
    groups = data_groups(model)
    optimizer.zero_grad(set_to_none=True)
    totals: torch.Tensor | None = None
    for part in parts:
        with phase("forward"):
            output = forward(model, part)
        with taken_sharded(output):
            with phase("loss"), noted_loss(output):
                total, weight = map(plain, loss(output, part))
            del output
            with phase("backward"), noted_backward():
                (total * SCALE).backward()
        sums = torch.stack([total.detach().to(_wide(total)), weight.detach().to(_wide(total))])
        totals = sums if totals is None else totals + sums
    if totals is None:
        raise ValueError("train_step was given no batch")
    with phase("loss"):
        for group in groups:
            dist.all_reduce(totals, group=group)
    with phase("clip"):
        parameters = [p for p in model.parameters() if p.requires_grad]
        sum_partial(parameters)
        mean = totals[0] / totals[1]
        correction = 1.0 / (SCALE * totals[1])
        norm = grad_norm(parameters) * correction
        scale_(parameters, correction * clip_factor(norm, clip) if clip is not None else correction)
    with phase("optimizer"):
        optimizer.step()
    restore_buffers(model)
    return Step(mean, norm)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> torch.Tensor:
    """The mean loss over the valid tokens of all batches and data ranks; the model is in eval mode
    meanwhile.
    """
    training = model.training
    model.eval()
    try:
        totals: torch.Tensor | None = None
        for batch in batches:
            output = forward(model, batch)
            with taken_sharded(output), noted_loss(output):
                total, weight = map(plain, loss(output, batch))
            del output
            sums = torch.stack([total.to(_wide(total)), weight.to(_wide(total))])
            totals = sums if totals is None else totals + sums
        if totals is None:
            raise ValueError("evaluate was given no batch")
        for group in data_groups(model):
            dist.all_reduce(totals, group=group)
        return totals[0] / totals[1]
    finally:
        model.train(training)
        restore_buffers(model)


def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's output for the batch entries that its forward takes; of a transformers model the logits."""
    with redistribute(_redistribution(model)):
        output = model(**inputs_of(model, batch))
    logits: torch.Tensor = logits_of(output)
    return logits


def data_groups(model: nn.Module) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks saw different tokens, for a parallel model; none for any other."""
    state = state_of(model)
    return () if state is None else state.data_groups


def _redistribution(model: nn.Module) -> str:
    state = state_of(model)
    return "greedy" if state is None else state.program.redistribute


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
