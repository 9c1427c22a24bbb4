"""What the rows of a batch compute by themselves, beside what they compute together: what data ranks do, without a rank.

A rank of a data axis, and a microbatch of a pipeline, has some rows of the batch. The sums of losses, the counts and the
gradients of two halves of a batch must add up to those of the whole one, and what a forward keeps in a buffer must be the
same. One process runs the unsharded small form on the whole batch and on its halves. A model or a loss that asks other ranks
for something is not judged: alone, it has none to ask.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelizer.child.children import WorldError, in_children
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.diagnostics.package_folder import ROOT
from parallelizer.language.plan import BATCH_AXES
from parallelizer.proof.mixed_rows import mixed_in_here
from parallelizer.proof.modes import Float64, PlainAttention
from parallelizer.proof.not_equal import rows_apart
from parallelizer.proof.not_finite import not_finite_in_here
from parallelizer.proof.observe import default_dtype, filled
from parallelizer.proof.scene import Scene
from parallelizer.proof.scenes import scenes_in_here
from parallelizer.proof.subject import Subject
from parallelizer.runtime import sum_over_batch
from parallelizer.runtime.loss_sums import loss_sums, wrong_loss
from parallelizer.runtime.pipeline.microbatches import has_rows
from parallelizer.runtime.step import forward

TOLERANCE = 1e-5
"""The relative difference of sums in float64 that is more than rounding, however a model amplifies it."""

WEIGHT = 2.0**26
"""Parameters times tokens at most: more is not computed four times within a few seconds."""

_TORCH = str(Path(torch.__file__).parent)
_ASKS = str(Path(dist.__file__).parent)
_SUMS = sum_over_batch.__file__


@dataclass(frozen=True)
class _Sums:
    """The mean loss of a batch, its gradients by parameter, and the buffers that its forward has left, of each part."""

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: tuple[Mapping[str, Tensor], ...]


def unequal_halves(subject: Subject, seed: int = 0) -> Diagnostic | None:
    """The error that the rows of a batch do not compute the same by themselves, or that the loss is no number, found in one
    process; None where neither is found, where the model is too large for it or does not run by itself.
    """
    weight = sum(p.numel() for p in subject.build().parameters()) * subject.tokens
    if weight > WEIGHT:
        return None
    try:
        (found,) = in_children([(_found, subject, seed)])
    except (WorldError, PlanError):
        return None
    error: Diagnostic | None = found
    return error


def _found(subject: Subject, seed: int) -> Diagnostic | None:
    """What `unequal_halves` returns, in the one child that looks for it."""
    differing = _differing(subject, seed)
    if differing is None:
        return None
    what, line = differing
    if what == _NO_NUMBER:
        return not_finite_in_here(subject, seed)
    span = line or mixed_in_here(subject, seed) or wrong_loss(subject.loss, "").diagnostics[0].span
    axes = [axis for axis in (*BATCH_AXES, "pp") if subject.mesh.sizes[axis] > 1]
    return rows_apart(axes, what, span)


_NO_NUMBER = "the loss is no number"


def _differing(subject: Subject, seed: int) -> tuple[str, Span | None] | None:
    """What of two halves of a batch is not that of the whole one, and the line where a scene that shows it decides otherwise."""
    divided = any(subject.mesh.sizes[axis] > 1 for axis in (*BATCH_AXES, "pp"))
    with default_dtype(torch.float64), Float64(), PlainAttention():
        model = filled(subject, seed, torch.float64)
        batch = _batch_of(subject, seed, Scene(1.0))
        with _asking() as asked:
            whole = _sums(subject, model, [batch], seed)
        if not math.isfinite(whole.loss):
            return _NO_NUMBER, None
        asks = asked() or any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        if not divided or subject.rows < 2 or subject.rows % 2 or asks:
            return None
        if not _near(whole.loss, _sums(subject, model, [batch], seed + 1).loss):
            return None  # a model that draws random numbers
        with _asking() as asked:
            apart = _sums(subject, model, _halves(subject, batch), seed)
        if asked():
            return None
        if (what := _described(whole, apart)) is not None:
            return what, None
    return _differing_in_a_scene(subject, model, seed)


def _differing_in_a_scene(subject: Subject, model: nn.Module, seed: int) -> tuple[str, Span | None] | None:
    """What of two halves of a batch is not that of the whole one with values for which the forward decides otherwise."""
    start = [parameter.detach().clone() for parameter in model.parameters()]
    for scene in scenes_in_here(subject, seed):
        with Float64(), PlainAttention(), default_dtype(torch.float64), _asking() as asked:
            batch = _batch_of(subject, seed, scene)
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), start, strict=True):
                    parameter.copy_(value * scene.scale)
            whole, apart = (_sums(subject, model, p, seed) for p in ([batch], _halves(subject, batch)))
        what = _described(whole, apart)
        if what is not None and math.isfinite(whole.loss) and not asked():
            return f"with {scene} {what}", scene.line
    return None


def _batch_of(subject: Subject, seed: int, scene: Scene) -> dict[str, Tensor]:
    batch = {k: v.double() if v.is_floating_point() else v for k, v in subject.batch(seed).items()}
    return scene.batch(batch, subject.workload, subject.rows)


def _halves(subject: Subject, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    half = subject.rows // 2
    return [
        {k: v[rows] if has_rows(k, v, subject.plan, subject.rows) else v for k, v in batch.items()}
        for rows in (slice(0, half), slice(half, subject.rows))
    ]


def _described(whole: _Sums, apart: _Sums) -> str | None:
    if not _near(whole.loss, apart.loss):
        return f"the loss is {whole.loss:.6g} for a batch, and {apart.loss:.6g} for its two halves together"
    size = math.hypot(*(g.norm().item() for g in whole.gradients.values()))
    for name in {**whole.gradients, **apart.gradients}:
        one, other = whole.gradients.get(name), apart.gradients.get(name)
        zero = torch.zeros(())
        error = ((one if one is not None else zero) - (other if other is not None else zero)).norm().item()
        own = one.norm().item() if one is not None else 0.0
        if not error <= TOLERANCE * max(own, 1e-3 * size):
            return f"the gradient of {name} is another for a batch than for its two halves together"
    for name, value in whole.buffers[0].items():
        if any(not _alike(value, part[name]) for part in apart.buffers):
            return f"the buffer {name} is another after a batch than after one half of it"
    return None


def _sums(subject: Subject, model: nn.Module, parts: list[dict[str, Tensor]], seed: int) -> _Sums:
    """Of the parts of a batch, each with the model as it was; gradients are those of the mean."""
    total, weight, buffers = 0.0, 0.0, []
    gradients: dict[str, Tensor] = {}
    for part in parts:
        torch.manual_seed(seed)
        own = copy.deepcopy(model)
        value, count = loss_sums(subject.loss, forward(own, part), part)
        if value.requires_grad:
            value.backward()
        total, weight = total + value.item(), weight + count.item()
        for name, param in own.named_parameters():
            if param.grad is not None:
                gradients[name] = gradients[name] + param.grad if name in gradients else param.grad
        state = own.state_dict()
        buffers.append({n: b.clone() for n, b in own.named_buffers() if n in state and b.is_floating_point()})
    mean = total / weight if weight else math.nan
    return _Sums(mean, {n: g / weight for n, g in gradients.items()} if weight else {}, tuple(buffers))


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other))


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=TOLERANCE, atol=1e-9, equal_nan=True)


@contextmanager
def _asking() -> Iterator[Callable[[], bool]]:
    """A function that says whether code of others has asked torch.distributed for anything in the meantime, were it only
    whether there are ranks, or code has summed over the batch.
    """
    asked = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal asked
        if event == "call" and not asked:
            file, caller = frame.f_code.co_filename, frame.f_back
            asked = file == _SUMS or (
                file.startswith(_ASKS)
                and caller is not None
                and not caller.f_code.co_filename.startswith((_TORCH, str(ROOT), "<"))
            )

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield lambda: asked
    finally:
        sys.setprofile(before)
