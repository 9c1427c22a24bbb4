"""The judge: gradients of a run on real ranks beside those of an unsharded run, both in float64.

It knows nothing of the proof. Ranks are forked from this process, the model is applied with the public functions, and
gradients are gathered as a state dict's values are. Parameters are not updated between the two batches, so what a step
leaves behind is buffers alone.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import parallelizer as pz
from tests.ranks import run_ranks
from tests.silent.case import Batch, Case, Verdict, load

EXACT = 1e-9
"""The largest relative error of a sum in float64 that was added in another order, with much to spare."""
SMALL = 1e-4
"""A gradient that is smaller than this share of all gradients is compared with that share."""
BATCHES = 2


@dataclass(frozen=True)
class Judgement:
    """The verdict, and the value with the largest error, or the error that was raised."""

    verdict: Verdict
    said: str
    error: float = 0.0


Values = dict[str, Tensor]


def judge(case: Case) -> Judgement:
    """Run a case on its ranks and without, and compare."""
    batches = [case.model.batch(seed) for seed in range(BATCHES)]
    expected = _unsharded(case, batches)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            got = run_ranks(_sharded, case.ranks, case, batches, timeout=60)
    except Exception as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()] or [repr(error)]
        return Judgement("fails", next((ln for ln in reversed(lines) if "Error" in ln), lines[0])[:300])
    worst, name = max((_worst(one, expected) for one in got), key=lambda pair: pair[0])
    return Judgement("right" if worst <= EXACT else "wrong", f"{name}: {worst:.1e}", worst)


def _unsharded(case: Case, batches: list[Batch]) -> Values:
    """Losses, gradients and buffers of a lone process, by torch alone."""
    model, loss, values = case.model.build(), load(case.loss), {}
    for step, batch in enumerate(batches):
        model.zero_grad()
        total, weight = loss(_called(model, batch), batch)
        mean = total / weight
        mean.backward()
        values[f"loss of batch {step}"] = mean.detach()
        for name, parameter in model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            values[f"gradient of {name}, batch {step}"] = gradient.clone()
    values |= {f"buffer {n}": b.clone() for n, b in model.state_dict().items() if n in _buffers(model)}
    return values


def _called(model: nn.Module, batch: Batch) -> Tensor:
    import inspect

    names = inspect.signature(model.forward).parameters
    return model(**{name: value for name, value in batch.items() if name in names})


def _buffers(model: nn.Module) -> set[str]:
    return {n for n, b in model.named_buffers() if b.is_floating_point()}


def _sharded(case: Case, batches: list[Batch]) -> Values:
    """The same of a rank. A plan that does not compile is applied nevertheless: its numbers may be right."""
    mesh = pz.build_mesh(pz.Mesh(case.axes), "cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(case.plan)
        plan = pz.load_plan(str(path))
    model, loss = case.model.build(), load(case.loss)
    names, buffers = [n for n, _ in model.named_parameters()], _buffers(model)
    pz.apply(pz.compile(plan, model, mesh, force=True), model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    values: Values = {}
    for step, batch in enumerate(batches):
        done = pz.train_step(model, pz.shard_batch(batch, plan, mesh), loss, optimizer)
        values[f"loss of batch {step}"] = done.loss
        whole = _gradients(model)
        values |= {f"gradient of {name}, batch {step}": whole[name] for name in names}
    whole = pz.whole_state_dict(model)
    values |= {f"buffer {n}": whole[n].clone() for n in buffers if n in whole}
    return values


@torch.no_grad()
def _gradients(model: nn.Module) -> Values:
    """Every gradient whole, in the model's own layout: gathered in the place of its parameter."""
    kept = [(p, p.detach().clone()) for p in model.parameters()]
    try:
        for parameter, value in kept:
            parameter.copy_(torch.zeros_like(value) if parameter.grad is None else parameter.grad)
        return {name: value.clone() for name, value in pz.whole_state_dict(model).items()}
    finally:
        for parameter, value in kept:
            parameter.copy_(value)


def _worst(got: Values, expected: Values) -> tuple[float, str]:
    """The largest error of a rank, and where it is."""
    gradients = [v for n, v in expected.items() if n.startswith("gradient")]
    least = SMALL * torch.stack([g.norm() for g in gradients]).norm().item()
    worst, where = 0.0, "all"
    for name, value in expected.items():
        found = got.get(name)
        if found is None or found.shape != value.shape:
            error = float("inf")
        else:
            floor = least if name.startswith("gradient") else 1e-12
            error = ((found - value).norm() / value.norm().clamp(min=floor)).item()
        if not error <= worst:
            worst, where = (error if error == error else float("inf")), name
    return worst, where
