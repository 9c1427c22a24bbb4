"""Modules are run whole, unsplit, and split over ranks under `wrap`; each group of cases is one start of
ranks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

from parallelizer.styles.context_parallel import balance
from parallelizer.styles.context_parallel.intercept import (
    ContextOptions,
    ContextParallelError,
    unwrap,
    wrap,
)
from tests.ranks import run_ranks
from tests.styles.context_parallel.reference import plain_attention, relative_error

pytestmark = pytest.mark.ranks

NAME = "layers.0.attention.inner"


class Attention(nn.Module):
    """Self-attention over [B, S, 16] in float64 with four query heads and two of keys and values."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(16, 32, dtype=torch.float64)
        self.call = call

    def forward(self, x: Tensor, *, is_causal: bool = True) -> Tensor:
        """Says what it does."""
        q, k, v = self.qkv(x).unflatten(-1, (8, 4)).transpose(1, 2).split([4, 2, 2], dim=1)
        return self.call(q, k, v, is_causal=is_causal, enable_gqa=True).transpose(1, 2).flatten(2)


class Outer(nn.Module):
    """Calls attention from a module within a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(inner, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def by_attribute(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **kwargs)


def by_keywords(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(value=v, key=k, query=q, **kwargs)


def positional(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, None, 0.0, is_causal, enable_gqa=enable_gqa)


def by_operator(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    return torch.ops.aten.scaled_dot_product_attention(q, k, v, **kwargs)


def deep(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    return (lambda: by_attribute(q, k, v, **kwargs))()


def per_head(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
    """Three dimensions, one call for each query head."""
    calls = [imported_by_name(q[:, h], k[:, h // 2], v[:, h // 2], is_causal=is_causal) for h in range(4)]
    return torch.stack(calls, dim=1)


STYLES: list[Any] = [imported_by_name, by_attribute, by_keywords, positional, by_operator, deep, per_head]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def sequence() -> Tensor:
    return torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1)).double()


def compare(module: nn.Module, group: Any, run: Callable[..., Tensor], wrapped: list[nn.Module]) -> float:
    """The largest relative error of the output and of every gradient, split over `group` against unsplit."""
    module.zero_grad()
    twin = copy.deepcopy(module)
    x, weights = sequence().requires_grad_(), sequence() + 0.5
    whole = run(module, x)
    (whole * weights).sum().backward()
    parts = [
        twin if m is module else twin.get_submodule(n) for n, m in module.named_modules() if m in wrapped
    ]
    for part in parts:
        wrap(part, group, name=NAME)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    local = balance.split(x.detach(), 1, ranks, rank).requires_grad_()
    out = run(twin, local)
    (out * balance.split(weights, 1, ranks, rank)).sum().backward()
    for parameter in twin.parameters():
        dist.all_reduce(parameter.grad, group=group)
    assert x.grad is not None and local.grad is not None
    errors = [relative_error(out, balance.split(whole, 1, ranks, rank))]
    errors.append(relative_error(local.grad, balance.split(x.grad, 1, ranks, rank)))
    for mine, right in zip(twin.parameters(), module.parameters(), strict=True):
        errors.append(relative_error(mine.grad, right.grad))  # type: ignore[arg-type]
    return max(errors)


def plainly(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def not_causal(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, is_causal=False)


def checkpointed(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=False)


def reentrant(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=True)


def multihead(module: nn.Module, x: Tensor) -> Tensor:
    mask = torch.ones(x.size(1), x.size(1)).triu(1).bool()
    return module(x, x, x, need_weights=False, is_causal=True, attn_mask=mask)[0]


def compiled(module: nn.Module, x: Tensor) -> Tensor:
    return torch.compile(module, backend="eager")(x)


def interception() -> dict[str, Any]:
    group = world()
    results: dict[str, Any] = {}
    for style in STYLES:
        module: Any = Attention(style)
        results[f"import {style.__name__} {len(results)}"] = compare(module, group, plainly, [module])
    for run in (not_causal, checkpointed, reentrant, compiled):
        module = Attention(by_attribute)
        results[run.__name__] = compare(module, group, run, [module])
    whole = Outer(Attention(imported_by_name))
    results["root"] = compare(whole, group, plainly, [whole])
    results["root, checkpointed"] = compare(whole, group, checkpointed, [whole])
    results["inner module"] = compare(whole, group, checkpointed, [whole.inner[0]])
    results["module between"] = compare(whole, group, checkpointed, [whole.inner])
    module = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    results["nn.MultiheadAttention"] = compare(module, group, multihead, [module])
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, dtype=torch.float64)
    results["nn.TransformerEncoderLayer"] = compare(layer, group, plainly, [layer])
    return results


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_way_to_call_attention_is_caught(ranks: int) -> None:
    for result in run_ranks(interception, ranks):
        assert {case: error for case, error in result.items() if not error < 1e-12} == {}


def meshes() -> dict[str, Any]:
    """A 2 x 2 mesh: context parallelism over either axis, and tensor parallelism over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    module: Any = nn.Sequential(Attention(by_attribute), Attention(imported_by_name))
    one, two = copy.deepcopy(module), copy.deepcopy(module)
    wrap(one[0], mesh["cp"], name="one")
    wrap(two[1], mesh["tp"], ContextOptions(keep_gathered=True), name="two")
    x = sequence()

    def local(t: Tensor, axis: str) -> Tensor:
        return balance.split(t, 1, 2, mesh.get_local_rank(axis))

    results: dict[str, Any] = {}
    # Interleaved, and nested in one graph, so that neither could have left anything for the other.
    a, b = one[0](local(x, "cp")), two[1](local(x, "tp"))
    (a.sum() + b.sum()).backward()
    for name, value, index, axis in (("first", a, 0, "cp"), ("second", b, 1, "tp")):
        results[f"{name} mesh"] = relative_error(value, local(module[index](x), axis))
    for index, used in ((0, one), (1, two)):
        module.zero_grad()
        module[index](x).sum().backward()
        grad = used[index].qkv.weight.grad
        dist.all_reduce(grad, group=mesh.get_group("cp" if index == 0 else "tp"))
        results[f"gradient {index}"] = relative_error(grad, module[index].qkv.weight.grad)

    q, k, v = (
        torch.randn(2, h, 24, 4, generator=torch.Generator().manual_seed(h)).double() for h in (4, 2, 2)
    )
    core = Core()
    wrap(core, mesh["cp"], name=NAME)
    for placement in (Shard(1), Shard(0), Replicate()):
        inputs = [
            distribute_tensor(
                balance.split(t, 2, 2, mesh.get_local_rank("cp")), mesh["tp"], [placement]
            ).requires_grad_()
            for t in (q, k, v)
        ]
        out: Any = core(*inputs, enable_gqa=True)
        results[f"{placement} is kept"] = (
            0.0 if isinstance(out, DTensor) and out.placements == (placement,) else 1.0
        )
        right_inputs: Any = [t.clone().requires_grad_() for t in (q, k, v)]
        right, _ = plain_attention(*right_inputs, is_causal=True, scale=0.5)
        results[f"{placement} out"] = relative_error(out.full_tensor(), local_rows(right, mesh))
        grads: Any = torch.autograd.grad(out.full_tensor().square().sum(), inputs)
        rights = torch.autograd.grad(right.square().sum(), right_inputs)
        for name, grad, expected in zip("qkv", grads, rights, strict=True):
            results[f"{placement} {name}"] = relative_error(grad.full_tensor(), local_rows(expected, mesh))

    def placed(*placements: Any) -> list[Tensor]:
        return [
            DTensor.from_local(t, mesh["tp"], [p], run_check=False)
            for t, p in zip((q, q, q), placements, strict=True)
        ]

    refused: dict[str, Any] = {
        "sequence": placed(Shard(2), Shard(2), Shard(2)),
        "size": placed(Shard(3), Shard(3), Shard(3)),
        "partial": placed(Partial(), Partial(), Partial()),
        "different": placed(Shard(1), Replicate(), Replicate()),
        "mixed": [*placed(Shard(1), Shard(1), Shard(1))[:2], q],
        "uneven": [distribute_tensor(q[:, :3], mesh["tp"], [Shard(1)])] * 3,
    }
    results["refused"] = {name: message(partial(core, *tensors)) for name, tensors in refused.items()}
    results["two axes"] = message(lambda: wrap(Core(), mesh), ValueError)
    return results


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **{"is_causal": True, **kwargs})


def local_rows(tensor: Tensor, mesh: Any) -> Tensor:
    return balance.split(tensor, 2, 2, mesh.get_local_rank("cp"))


def message(call: Callable[[], Any], kind: type[Exception] = ContextParallelError) -> str | None:
    """What the exception of exactly this type says; None without one."""
    try:
        call()
    except Exception as error:
        if type(error) is kind:
            return str(error)
        raise
    return None


def test_two_meshes_at_once_and_tensor_parallel_heads() -> None:
    for result in run_ranks(meshes, 4):
        refused = result.pop("refused")
        assert "one axis" in result.pop("two axes")
        assert {case: error for case, error in result.items() if not error < 1e-12} == {}
        for name, words in {
            "sequence": "are not supported",
            "size": "are not supported",
            "partial": "are not supported",
            "different": "different placements",
            "mixed": "partly DTensors",
            "uneven": "not a multiple of the 2 ranks",
        }.items():
            assert words in refused[name] and refused[name].startswith(f"{NAME}: ")


class NoAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.transpose(-1, -2)


class CheckpointInside(Attention):
    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


class Failing(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        F.scaled_dot_product_attention(q, q, q)
        raise KeyError("from the user's forward")


def refusals() -> dict[str, Any]:
    q = torch.randn(2, 4, 8, 16)
    core = Core()
    wrap(core, world(), name=NAME)
    plain = F.scaled_dot_product_attention(q, q, q)
    rows = torch.ones(8, 8, dtype=torch.bool)
    results: dict[str, Any] = {}
    calls: dict[str, Callable[[], Any]] = {
        "attn_mask": lambda: core(q, q, q, attn_mask=rows, is_causal=False),
        "dropout": lambda: core(q, q, q, dropout_p=1.1),
        "lengths": lambda: core(q[:, :, :1], q, q, is_causal=False),
        "broadcast heads": lambda: core(q, q[:, :1], q[:, :1]),
        "broadcast batch": lambda: core(q, q[:1], q[:1]),
        "five dimensions": lambda: core(q[None], q[None], q[None]),
        "odd": lambda: core(q[:, :, :7], q[:, :, :7], q[:, :, :7]),
        "dtypes": lambda: core(q, q.double(), q),
        "nested": lambda: core(*[torch.nested.nested_tensor([q[0], q[1]], layout=torch.strided)] * 3),
    }
    for name, call in calls.items():
        with torch.no_grad():
            results[name] = message(call)
        # Nothing stays behind: attention outside is plain again, masks and all.
        outside = F.scaled_dot_product_attention(q, q, q, attn_mask=rows)
        results[f"after {name}"] = torch.allclose(outside, plain, atol=1e-6)
    results["heads"] = message(lambda: core(q, q[:, :2], q[:, :2]), RuntimeError)

    failing = Failing()
    wrap(failing, world())
    results["KeyError"] = message(lambda: failing(q), KeyError)
    results["after KeyError"] = torch.equal(F.scaled_dot_product_attention(q, q, q), plain)

    empty = NoAttention()
    wrap(empty, world(), name=NAME)
    results["never called"] = message(lambda: empty(q))
    inside = CheckpointInside(by_attribute)
    wrap(inside, world(), name=NAME)
    x = balance.split(sequence(), 1, 2, dist.get_rank()).requires_grad_()
    out = inside(x)
    try:
        out.sum().backward()
    except RuntimeError as error:
        results["checkpoint inside"] = str(error)
    inside.use_reentrant = True
    results["reentrant checkpoint inside"] = message(lambda: inside(x))
    return results


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_represented_is_refused_and_leaves_nothing_behind() -> None:
    for result in run_ranks(refusals, 2):
        assert all(holds for name, holds in result.items() if name.startswith("after "))
        assert "must match" in result.pop("heads")
        assert "user's forward" in result.pop("KeyError")
        assert "different metadata" in result.pop("checkpoint inside")
        for name, words in {
            "attn_mask": "made from a local length, and the sequence has 16",
            "dropout": "dropout_p=1.1 is no probability",
            "lengths": "a sequence of 2 rows cannot be cut into 4",
            "broadcast heads": "pass enable_gqa=True",
            "broadcast batch": "would be broadcast",
            "five dimensions": "four dimensions",
            "odd": "14 rows cannot be cut",
            "dtypes": "one floating dtype",
            "nested": "nested",
            "never called": "never called scaled_dot_product_attention",
            "reentrant checkpoint inside": "use_reentrant=False",
        }.items():
            assert result[name] is not None and words in result[name], name
            assert result[name].startswith(f"{NAME}: ")


def life() -> dict[str, Any]:
    group, rank = world(), dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    other = dist.new_group([0])
    module = Attention(by_attribute)
    x = sequence()
    part = balance.split(x, 1, 2, rank)
    whole = module(x)
    facts: dict[str, Any] = {}

    signature = inspect.signature(module.forward)
    wrap(module, group, name=NAME)
    facts["signature"] = inspect.signature(module.forward) == signature
    facts["docstring"] = module.forward.__doc__ == "Says what it does."
    facts["wrapped"] = relative_error(module(part), balance.split(whole, 1, 2, rank)) < 1e-12
    facts["twice"] = "already" in (message(lambda: wrap(module, group, name=NAME), ValueError) or "")

    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.qkv.weight.zero_()
    facts["a copy runs on its own weights"] = not torch.allclose(twin(part), module(part))
    unwrap(twin)
    facts["a copy is unwrapped alone"] = (
        relative_error(module(part), balance.split(whole, 1, 2, rank)) < 1e-12
    )

    unwrap(module)
    facts["unwrapped"] = torch.equal(module(x), whole) and "forward" not in vars(module)
    unwrap(module)
    wrap(module, alone, name=NAME)
    facts["one rank is left as it is"] = "forward" not in vars(module)
    facts["outside"] = rank == 0 or "not in the process group" in (
        message(lambda: wrap(module, other), ValueError) or ""
    )

    def patched(x: Tensor) -> Tensor:
        return type(module).forward(module, x) + 1

    module.forward = patched  # type: ignore[method-assign, assignment]
    wrap(module, group)
    facts["a replaced forward"] = relative_error(module(part), balance.split(whole + 1, 1, 2, rank)) < 1e-12
    unwrap(module)
    facts["a replaced forward is restored"] = module.forward is patched

    mixed = Core()
    q = torch.randn(2, 4, 8, 16)
    wrap(mixed, group)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mixed(q, q, q.bfloat16())
    facts["autocast"] = out.dtype == torch.bfloat16
    return facts


def test_wrap_and_unwrap() -> None:
    for result in run_ranks(life, 2):
        assert {fact for fact, holds in result.items() if not holds} == set()
