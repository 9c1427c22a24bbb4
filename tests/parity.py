"""A sharded training run beside an unsharded one, in float64: both must agree to rounding.

The unsharded run shares no code with the parallel one beyond the model and its initial values: the loss is
the mean over all valid tokens, the gradients are autograd's, the norm is torch's.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import Mesh, Option, Plan, StyleDefaults
from parallelizer.runtime.state import state_of
from parallelizer.styles.sharded_logits import plain
from tests.ranks import run_ranks

SEED = 5
ROWS, TOKENS, VOCAB = 4, 16, 32
CLIP = 0.3
EXACT = 1e-11
"""Relative errors of sums in float64 that were added in another order; anything wrong is far above."""

Batch = dict[str, Tensor]
Errors = dict[str, float]


@cache
def plan(text: str) -> Plan:
    """The plan of a YAML text: hundreds of cases have a few."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(text)
        return pz.load_plan(str(path))


def style_defaults(options: Mapping[str, Mapping[str, Any]]) -> dict[str, StyleDefaults]:
    """A preset's options by style."""
    where = Span("<preset>")
    return {
        style: StyleDefaults({k: Option(v, where) for k, v in own.items()}) for style, own in options.items()
    }


def token_batch() -> Batch:
    """Random tokens, and as many labels."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(0, VOCAB, (2, ROWS, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": labels}


def ignored_batch() -> Batch:
    """Every row has another number of labels that count, the first none."""
    batch = token_batch()
    for row in range(ROWS):
        batch["labels"][row, row * 5 :] = -100
    return batch


def token_loss(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over local tokens, and their number."""
    labels = batch["labels"]
    total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


@dataclass(frozen=True)
class Case:
    """One model under one plan on one mesh.

    `accumulate` cuts the rows of each rank into parts, `options` are a preset's, by style; the sharded run
    happens in `setting`.
    """

    name: str
    plan: Plan
    mesh: Mapping[str, int]
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch] = token_batch
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    accumulate: int = 1
    clip: float | None = CLIP
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def ranks(self) -> int:
        return Mesh(self.mesh).world_size


@dataclass(frozen=True)
class Outcome:
    """What two steps computed: each step's loss and gradient norm, the gradients of the first and the
    parameters after both by name, and logits in evaluation.
    """

    losses: list[Tensor]
    norms: list[Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    logits: Tensor


def unsharded(case: Case) -> Outcome:
    """Two steps in one process, written out."""
    model = pz.materialize(_on_meta(case.model), device="cpu", seed=SEED)
    batch = case.batch()
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    optimizer = _optimizer(model)
    losses, norms, gradients = [], [], {}
    with keep_float64():
        for step in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(
                model(**inputs).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
            )
            loss.backward()
            losses.append(loss.detach())
            norms.append(
                nn.utils.clip_grad_norm_(model.parameters(), torch.inf if case.clip is None else case.clip)
            )
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
        with torch.no_grad():
            logits = model.eval()(**inputs)
    return Outcome(losses, norms, gradients, {n: p.detach() for n, p in model.named_parameters()}, logits)


def sharded(case: Case, mesh: DeviceMesh) -> Outcome:
    """Two steps on this rank, and everything gathered again; `logits` are those of this rank's rows of the
    batch.
    """
    model = _on_meta(case.model)
    program = pz.compile(case.plan, model, mesh, defaults=style_defaults(case.options))
    pz.materialize(pz.apply(program, model, mesh), device="cpu", seed=SEED)
    optimizer = _optimizer(model)
    index, count = pz.batch_rank(mesh)
    rows = {k: v.chunk(count)[index] for k, v in case.batch().items()}
    cuts = [
        dict(zip(rows, parts, strict=True))
        for parts in zip(*(v.chunk(case.accumulate) for v in rows.values()), strict=True)
    ]
    parts = [pz.shard_batch(part, case.plan, mesh, rows="local") for part in cuts]
    losses, norms, gradients = [], [], {}
    with keep_float64():
        for step in range(2):
            done = pz.train_step(model, parts, token_loss, optimizer, case.clip)
            losses.append(done.loss)
            norms.append(done.grad_norm)
            if step == 0:
                gradients = gathered(
                    model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                )
        with torch.no_grad():
            local = pz.shard_batch(rows, case.plan, mesh, rows="local")
            logits = model.eval()(**{k: v for k, v in local.items() if k != "labels"})
            logits = pz.unshard(logits, mesh) if case.plan.batch else plain(logits)
    pz.restore_buffers(model)
    return Outcome(losses, norms, gradients, gathered(model, dict(model.named_parameters())), logits)


def gathered(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of parameters, from all ranks and in their original order."""
    state = state_of(model)
    packed = state.packed if state else {}
    whole = {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for n, t in tensors.items()}
    return {n: packed[n].unpack(t) if n in packed else t for n, t in whole.items()}


def errors(got: Outcome, expected: Outcome) -> Errors:
    """Relative errors of everything that was computed; what is missing or of another kind is infinitely
    wrong.
    """
    pairs = {f"loss {i}": pair for i, pair in enumerate(zip(got.losses, expected.losses, strict=True))}
    pairs |= {f"norm {i}": pair for i, pair in enumerate(zip(got.norms, expected.norms, strict=True))}
    pairs |= {
        f"gradient {n}": (got.gradients.get(n, torch.tensor(0)), g) for n, g in expected.gradients.items()
    }
    pairs |= {f"parameter {n}": (got.parameters[n], p) for n, p in expected.parameters.items()}
    pairs["logits"] = (got.logits, expected.logits)
    surplus = {f"gradient {n}": torch.inf for n in got.gradients if n not in expected.gradients}
    return {name: relative(*pair) for name, pair in pairs.items()} | surplus


def relative(value: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return torch.inf
    return ((value - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def compare(cases: Sequence[Case]) -> dict[str, Errors | str]:
    """Run cases of one number of ranks in one start of ranks. By name: the largest errors of any rank, or a
    traceback.
    """
    references = {case.name: unsharded(case) for case in cases}

    def worker() -> dict[str, Errors | str]:
        meshes: dict[str, DeviceMesh] = {}
        found: dict[str, Errors | str] = {}
        for case in cases:
            sizes = Mesh(case.mesh)
            if str(sizes) not in meshes:
                meshes[str(sizes)] = pz.build_mesh(sizes, "cpu")
            mesh = meshes[str(sizes)]
            index, count = pz.batch_rank(mesh)
            expected = references[case.name]
            expected = Outcome(**{**vars(expected), "logits": expected.logits.chunk(count)[index]})
            try:
                with case.setting():
                    got = sharded(case, mesh)
                found[case.name] = errors(got, expected) | {"norm on other ranks": _spread(got.norms)}
            except Exception:
                found[case.name] = traceback.format_exc()
        return found

    (ranks,) = {case.ranks for case in cases}
    return _worst(run_ranks(worker, ranks))


def asked_for(cases: Sequence[Case], request: pytest.FixtureRequest) -> list[Case]:
    """Those that a test of this run names in its parameter `name`: ranks need not compute what nobody reads."""
    calls = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    names = {call.params.get("name") for call in calls if call}
    return [case for case in cases if case.name in names]


def assert_exact(result: Errors | str) -> None:
    """Nothing is off by more than rounding, and the norm has the same bits on every rank."""
    assert not isinstance(result, str), result
    wrong = {name: error for name, error in result.items() if not error < EXACT}
    assert not wrong
    assert result["norm on other ranks"] == 0


@contextmanager
def keep_float64() -> Iterator[None]:
    """Lifts a model's explicit casts to float32, so that float64 stays float64.

    A function mode would not do: it is off while a checkpoint runs the forward again.
    """
    lower, cast = Tensor.float, Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lowers = self.dtype == torch.float64 and args == (torch.float32,) and not kwargs
        return self if lowers else cast(self, *args, **kwargs)

    Tensor.float = lambda self: self if self.dtype == torch.float64 else lower(self)  # type: ignore[method-assign]
    Tensor.to = to  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Tensor.float, Tensor.to = lower, cast  # type: ignore[method-assign]


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build().double()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # Not Adam, which forgives gradients that are wrong by a factor.
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)


def _spread(norms: Sequence[Tensor]) -> float:
    """The largest difference between this rank's norms and any other's."""
    mine = torch.stack(list(norms))
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return (high - low).max().item()


def _worst(by_rank: Sequence[dict[str, Errors | str]]) -> dict[str, Errors | str]:
    """The largest error of any rank; a traceback if one has any."""
    worst: dict[str, Errors | str] = {}
    for name in by_rank[0]:
        results = [found[name] for found in by_rank]
        tracebacks = [r for r in results if isinstance(r, str)]
        numbers = [r for r in results if not isinstance(r, str)]
        worst[name] = (
            tracebacks[0] if tracebacks else {key: max(r[key] for r in numbers) for key in numbers[0]}
        )
    return worst
