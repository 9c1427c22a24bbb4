"""Small models with something planted into them, and what ranks tell of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.language.plan import Mesh, Plan
from parallelizer.models.llama import Llama
from tests.parity import VOCAB, Batch, style_defaults, token_batch

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 4,
    "hidden_dim": 48,
    "max_seq_len": 16,
}


def loaded(plan: Plan | str) -> Plan:
    """A plan, or the one of that name."""
    return plan if isinstance(plan, Plan) else pz.load_plan(plan)


def parallel(
    mesh: DeviceMesh,
    plan: Plan | str = "llama",
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    model: nn.Module | None = None,
) -> nn.Module:
    """A parallel Llama in float32, the same values on every mesh."""
    if model is None:
        with torch.device("meta"):
            model = Llama(**SIZES)
    program = pz.compile(loaded(plan), model, mesh, defaults=style_defaults(options or {}))
    return pz.materialize(pz.apply(program, model, mesh), device="cpu", seed=3)


def parts_of(mesh: DeviceMesh, plan: Plan | str = "llama", accumulate: int = 1, seed: int = 0) -> list[Batch]:
    """This rank's parts of a batch of 4 rows of 16 tokens."""
    index, ranks = pz.batch_rank(mesh)
    rows = {name: t.roll(seed, 0).chunk(ranks)[index] for name, t in token_batch().items()}
    if seed:
        rows = {name: (t + seed) % VOCAB for name, t in rows.items()}
    cuts = [
        dict(zip(rows, parts, strict=True))
        for parts in zip(*(t.chunk(accumulate) for t in rows.values()), strict=True)
    ]
    return [pz.shard_batch(part, loaded(plan), mesh, rows="local") for part in cuts]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


class _Spoilt(torch.autograd.Function):
    """The identity, with a backward that is infinite in one place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        local = spoilt.to_local() if isinstance(spoilt, DTensor) else spoilt
        local.view(-1)[0] = torch.inf
        return spoilt


@contextmanager
def spoilt(module: nn.Module, rank: int, *, backward: bool = False) -> Iterator[None]:
    """On one rank the module's own forward puts out a NaN, or its backward an infinite gradient to its input."""
    inner = module.forward
    if dist.get_rank() == rank:

        def forward(x: Tensor, *args: Any) -> Any:
            if backward:
                return inner(_Spoilt.apply(x), *args)
            out = inner(x, *args)
            return out * torch.nan

        module.forward = forward
    try:
        yield
    finally:
        module.forward = inner


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of every byte that a step changes: parameters, buffers, and all that the optimizer remembers."""
    every: list[Any] = [*model.parameters(), *model.buffers()]
    for param in model.parameters():
        every += [value for _, value in sorted(optimizer.state.get(param, {}).items())]
    digested = hashlib.sha256()
    for tensor in every:
        local = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
        digested.update(local.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digested.hexdigest()


def mesh_of(**sizes: int) -> DeviceMesh:
    return pz.build_mesh(Mesh(sizes), "cpu")
