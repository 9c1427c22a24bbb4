"""A sharded training run beside an unsharded one, in float64: what both compute must agree to rounding.

The unsharded run shares no code with the parallel one beyond the model and its initial values: the loss is the mean over all
valid tokens, the norm is torch's, the gradients are autograd's.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.plan import Mesh, Option, Plan, StyleDefaults
from parallelizer.diagnostics import Span
from parallelizer.state import state_of
from tests.ranks import run_ranks

SEED = 5
ROWS, TOKENS, VOCAB = 4, 16, 32
CLIP = 0.5

Batch = dict[str, Tensor]
Gradients = dict[str, Tensor]


@contextmanager
def keep_float64() -> Iterator[None]:
    """Lifts a model's explicit casts to float32, so that float64 stays float64.

    A function mode would not do: it is off while a checkpoint runs the forward again.
    """
    lower = Tensor.float
    Tensor.float = lambda self: self if self.dtype == torch.float64 else lower(self)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.float = lower  # type: ignore[method-assign]


@dataclass(frozen=True)
class Case:
    """One model under one plan on one mesh. `batch` gives the global batch, `accumulate` cuts each rank's rows of it."""

    name: str
    plan: Plan
    mesh: Mapping[str, int]
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    accumulate: int = 1
    clip: float | None = CLIP

    @property
    def ranks(self) -> int:
        return Mesh(self.mesh).world_size


@dataclass(frozen=True)
class Outcome:
    """What two steps computed: losses and gradient norms of both, the first step's gradients, parameters and logits after both."""

    losses: list[Tensor]
    norms: list[Tensor]
    gradients: Gradients
    parameters: Gradients
    logits: Tensor


def token_batch(rows: int = ROWS, tokens: int = TOKENS, *, ignored: bool = False) -> Batch:
    """Random tokens and labels; `ignored` masks a different number of labels in every row, a whole row among them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
    labels = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
    if ignored:
        for row in range(rows):
            labels[row, : row * 5] = -100
        labels[0] = -100
    return {"input_ids": ids, "labels": labels}


def token_loss(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over local tokens, and their number."""
    labels = batch["labels"]
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"), (labels != -100).sum()


def unsharded(case: Case) -> Outcome:
    """Two steps in one process, written out."""
    model = pz.materialize(_on_meta(case.model), device="cpu", seed=SEED)
    batch = case.batch()
    optimizer = _optimizer(model)
    losses, norms, gradients = [], [], {}
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with keep_float64():
        for step in range(2):
            optimizer.zero_grad()
            logits = model(**inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), torch.inf if case.clip is None else case.clip))
            losses.append(loss.detach())
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(**inputs)
    return Outcome(losses, norms, gradients, {n: p.detach() for n, p in model.named_parameters()}, logits)


def sharded(case: Case) -> Outcome:
    """Two steps on this rank, with everything gathered again; `logits` are those of this rank's rows."""
    mesh = pz.build_mesh(Mesh(case.mesh), "cpu")
    model = _on_meta(case.model)
    span = Span("defaults")
    defaults = {s: StyleDefaults({k: Option(v, span) for k, v in o.items()}) for s, o in case.defaults.items()}
    program = pz.compile(case.plan, model, mesh, defaults=defaults)
    model = pz.materialize(pz.apply(program, model, mesh), device="cpu", seed=SEED)
    optimizer = _optimizer(model)
    losses, norms, gradients = [], [], {}
    rows = local_rows(case.batch(), mesh)
    size = next(iter(rows.values())).size(0) // case.accumulate
    parts = [{k: v[i * size : (i + 1) * size] for k, v in rows.items()} for i in range(case.accumulate)]
    parts = [pz.shard_batch(part, case.plan, mesh) for part in parts]
    with keep_float64():
        for step in range(2):
            done = pz.train_step(model, parts, token_loss, optimizer, case.clip)
            losses.append(done.loss)
            norms.append(done.grad_norm)
            if step == 0:
                gradients = whole(model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        model.eval()
        with torch.no_grad():
            local = pz.shard_batch(rows, case.plan, mesh)
            logits = pz.unshard(model(**{k: v for k, v in local.items() if k != "labels"}), mesh)
    pz.restore_buffers(model)
    return Outcome(losses, norms, gradients, whole(model, dict(model.named_parameters())), logits)


def local_rows(batch: Batch, mesh: Any) -> Batch:
    """This rank's rows of the global batch."""
    index, ranks = pz.batch_rank(mesh)
    return {k: v.chunk(ranks)[index] for k, v in batch.items()}


def whole(model: nn.Module, tensors: Mapping[str, Tensor]) -> Gradients:
    """Tensors named as parameters, gathered over all ranks and in their original order."""
    packed = state_of(model).packed
    gathered = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        gathered[name] = packed[name].unpack(full.detach()) if name in packed else full.detach()
    return gathered


def errors(got: Outcome, expected: Outcome, logits: Tensor) -> dict[str, float]:
    """Relative errors by name, of everything that was computed; a missing gradient is an infinite error."""
    found = {}
    for step, (a, b) in enumerate(zip(got.losses, expected.losses, strict=True)):
        found[f"loss {step}"] = relative(a, b)
    for step, (a, b) in enumerate(zip(got.norms, expected.norms, strict=True)):
        found[f"norm {step}"] = relative(a, b)
    for name, gradient in expected.gradients.items():
        found[f"gradient {name}"] = relative(got.gradients[name], gradient) if name in got.gradients else torch.inf
    for name, value in expected.parameters.items():
        found[f"parameter {name}"] = relative(got.parameters[name], value)
    found["logits"] = relative(got.logits, logits)
    return found


def relative(value: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return torch.inf
    return ((value - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def compare(cases: Sequence[Case], setting: Callable[[], Any] | None = None) -> dict[str, dict[str, float] | str]:
    """Run cases of one number of ranks in one start. By case: the errors, the worst of all ranks, or a traceback."""
    references = {case.name: unsharded(case) for case in cases}

    def worker() -> dict[str, dict[str, float] | str]:
        found: dict[str, dict[str, float] | str] = {}
        for case in cases:
            try:
                got = sharded(case)
                index, ranks = pz.batch_rank(pz.build_mesh(Mesh(case.mesh), "cpu"))
                expected = references[case.name]
                found[case.name] = errors(got, expected, expected.logits.chunk(ranks)[index])
            except Exception:
                found[case.name] = traceback.format_exc()
        return found

    return worst(run_ranks(worker, cases[0].ranks))


def worst(by_rank: Sequence[dict[str, dict[str, float] | str]]) -> dict[str, dict[str, float] | str]:
    """The largest error of any rank; a traceback if one has any."""
    merged: dict[str, dict[str, float] | str] = {}
    for name in by_rank[0]:
        results = [r[name] for r in by_rank]
        failed = next((r for r in results if isinstance(r, str)), None)
        merged[name] = failed or {k: max(r[k] for r in results) for k in results[0]}  # type: ignore[index]
    return merged


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build().double()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # Not Adam: it forgives gradients that are wrong by a factor.
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
