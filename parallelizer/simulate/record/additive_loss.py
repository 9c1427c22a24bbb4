"""Tests that the loss of a batch is the sum of the losses of its parts.

A step splits the global batch over ranks and over `accumulate` parts, and adds up what the loss returns for each. That is
the loss of the global batch only if both numbers are sums. A mean with a constant count of 1 has the right form, and the
wrong value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallelizer.language.plan import BATCH_AXES, Mesh
from parallelizer.language.workload import Workload
from parallelizer.runtime.loss_sums import WANTED, loss_sums, wrong_loss
from parallelizer.runtime.step import Loss
from parallelizer.runtime.sum_over_batch import summing_by

ROWS, TOKENS = 2, 16
"""The size of the batch that the loss is tried on: real tensors, however large the configured batch is."""

LARGEST = 2**24
"""The most elements of an output that are made up; a larger output is not tried."""

TOLERANCE = 1e-3
ROUNDING = 2e-5
"""The relative difference of sums, which a batch may change a little, and that of a mean, which only rounding changes."""

Batch = Mapping[str, torch.Tensor]


@dataclass
class TriedLoss:
    """A loss, and the shape of the output and of the batch that it was called with last."""

    loss: Loss
    output: tuple[int, ...] = ()
    batch: Mapping[str, tuple[int, ...]] | None = None

    def watched(self) -> Loss:
        """The loss, which notes the shapes it is given."""

        @functools.wraps(self.loss)
        def called(output: Any, batch: Any) -> Any:
            self.output = tuple(getattr(output, "shape", ()))
            self.batch = {name: tuple(tensor.shape) for name, tensor in batch.items()}
            return self.loss(output, batch)

        return called


def refuse_other_than_sums(seen: TriedLoss, workload: Workload, mesh: Mesh, microbatches: int = 1) -> None:
    """Raises PlanError (`wrong-loss`) for a loss whose two numbers for a batch are not the sums of those of its parts: of its
    rows where ranks, parts of the batch or microbatches hold different rows, of its tokens where ranks hold different tokens.
    Means are right where no label is left out of the loss, so that all parts weigh the same.

    The loss runs on a small made-up output. A loss that fails there, or that draws random numbers, is not judged; nor is
    one that calls `sum_over_batch`.
    """
    axes = [
        ("batch", workload.accumulate * microbatches * mesh.size(*BATCH_AXES)),
        ("sequence", mesh.size("cp")),
    ]
    for word, parts in axes:
        if parts > 1:
            _judge(seen, workload, word)


def _judge(seen: TriedLoss, workload: Workload, word: str) -> None:
    made = _made_up(seen, workload)
    if made is None:
        return
    output, batch, sizes = made
    dims = {name: _dim(entry.shape, word) for name, entry in workload.entries.items()}
    dim = {"batch": 0, "sequence": 1}[word]
    if sizes[dim] < 2 or output.ndim <= dim or output.shape[dim] != sizes[dim]:
        return

    def part(first: int, last: int) -> tuple[float, float]:
        cut = {
            name: tensor if (at := dims.get(name)) is None else tensor.narrow(at, first, last - first)
            for name, tensor in batch.items()
        }
        return _numbers(seen.loss, output.narrow(dim, first, last - first), cut)

    size, half = sizes[dim], sizes[dim] // 2
    summed_elsewhere: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        summed_elsewhere.append(tensor)
        return tensor

    try:
        with summing_by(noted):
            whole, again = part(0, size), part(0, size)
            halves = part(0, half), part(half, size)
    except Exception:  # the loss wants sizes, or values, that a made-up batch does not have
        return
    if summed_elsewhere:
        return  # it knows of other ranks' tokens, and a part alone does not tell what it is with them
    summed = tuple(sum(numbers) for numbers in zip(*halves, strict=True))
    if any(map(math.isnan, whole)):
        return  # it wants an output that a made-up one is not
    if whole != again or all(map(_close, whole, summed)):
        return
    if _close(whole[0] * summed[1], summed[0] * whole[1], ROUNDING):
        return  # a mean of parts that always weigh the same is the mean
    of = "rows" if word == "batch" else "halves of its sequence"
    why = "a step adds up both numbers over all ranks and parts of the batch, and divides once"
    if word == "sequence":
        why = "ranks of cp hold different tokens, so labels are shifted in the data and not in the loss"
    raise wrong_loss(
        seen.loss,
        f"returns {_pair(whole)} for a batch, but {' and '.join(map(_pair, halves))} for the two {of}, which add up to "
        f"{_pair(summed)}",
        f"{WANTED}: {why}",
    )


def _numbers(loss: Callable[..., Any], output: torch.Tensor, batch: Batch) -> tuple[float, float]:
    with torch.no_grad():
        total, weight = loss_sums(loss, output, batch)
    return float(total), float(weight)


def _made_up(
    seen: TriedLoss, workload: Workload
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[int]] | None:
    """A small output and batch of real tensors, with their numbers of rows and tokens; None where none can be made."""
    if not seen.output or not seen.batch:
        return None
    had = [_size(seen.batch, workload, word) for word in ("batch", "sequence")]
    sizes = [min(n, most) for n, most in zip(had, (ROWS, TOKENS), strict=True)]
    sizes[0] = ROWS
    if len(seen.output) < 2 or seen.output[1] != had[1]:
        sizes[1] = had[1]  # the output counts no tokens
    shape = list(seen.output)
    for dim, (before, after) in enumerate(zip(had, sizes, strict=True)):
        if dim < len(shape) and shape[dim] == before:
            shape[dim] = after
    if shape[0] != ROWS or torch.Size(shape).numel() > LARGEST:
        return None
    generator = torch.Generator().manual_seed(0)
    batch = workload.example(sizes[0], sizes[1])
    for name, entry in workload.entries.items():
        if entry.ignore is not None and batch[name].ndim > 1:
            tokens = batch[name][0]
            tokens[: len(tokens) // 4] = entry.ignore  # so that the parts have other numbers of tokens
    return torch.randn(shape, generator=generator), batch, sizes


def _size(batch: Mapping[str, Sequence[int]], workload: Workload, word: str) -> int:
    found = (batch[n][at] for n, e in workload.entries.items() if n in batch for at in _dims(e.shape, word))
    return next(found, 0)


def _dims(shape: Sequence[str | int], word: str) -> Iterator[int]:
    yield from (at for at, name in enumerate(shape) if name == word)


def _dim(shape: Sequence[str | int], word: str) -> int | None:
    return next(_dims(shape, word), None)


def _close(a: float, b: float, tolerance: float = TOLERANCE) -> bool:
    return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b))


def _pair(numbers: Sequence[float]) -> str:
    return f"({', '.join(f'{n:.4g}' for n in numbers)})"
