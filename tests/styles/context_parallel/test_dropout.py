"""Attention with dropout over a split sequence: exact for what is drawn, and what is drawn is right across ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from parallelizer import torch_private
from parallelizer.child.children import in_children
from parallelizer.simulate.fake_world import enter_fake_world
from parallelizer.styles.context_parallel import balance
from parallelizer.styles.context_parallel.attention import context_attention
from parallelizer.styles.context_parallel.choice import Heads, sent
from parallelizer.styles.context_parallel.dropout import draw_seed, kept
from parallelizer.styles.context_parallel.intercept import ContextOptions, wrap
from parallelizer.styles.context_parallel.order import Order
from tests.ranks import run_ranks
from tests.styles.context_parallel.matrix import BATCH, ORDERS, SIZE, Case, draw, order_of
from tests.styles.context_parallel.reference import relative_error
from tests.styles.context_parallel.test_methods import bytes_sent

Tensor = torch.Tensor
RANKS = (1, 4)
HEADS = Heads(4, 2)
ROWS = 6
"""Of one rank."""
P = 0.3
DRAWS = 300
KINDS = ("causal", "none", "boolean", "added", "of keys")


def mask_of(kind: str, rows: int) -> Tensor | None:
    """Of the whole sequence."""
    generator = torch.Generator().manual_seed(2)
    if kind == "boolean":
        mask = torch.rand(BATCH, 1, rows, rows, generator=generator) < 0.6
        mask[:, :, 1] = False  # a row that sees nothing
        return mask
    if kind == "added":
        return torch.randn(BATCH, HEADS.queries, rows, rows, generator=generator, dtype=torch.float64)
    return torch.rand(BATCH, 1, 1, rows, generator=generator) < 0.6 if kind == "of keys" else None


def whole(local: Tensor, group: dist.ProcessGroup, order: Order) -> Tensor:
    """All ranks' rows, in their order."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, local, group=group)
    return order.join(parts, 2)


def from_its_definition(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, mask: Tensor | None, keep: Tensor
) -> Tensor:
    """Dropout of the softmax, with the draws given; nothing of the code under test."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, dim=1)) * SIZE**-0.5
    if is_causal:
        scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, scores.softmax(dim=-1).nan_to_num())
    return (weights * keep / (1 - P)) @ v.repeat_interleave(2, dim=1)


def errors(group: dist.ProcessGroup, kind: str, name: str) -> dict[str, float]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = ranks * ROWS
    order = order_of(Case(ranks, "auto", name, kind, HEADS, rows), rows)
    q, k, v, grad = draw(len(kind), HEADS, rows)
    mask, is_causal = mask_of(kind, rows), kind == "causal"
    inputs: Any = [t.clone().requires_grad_() for t in (q, k, v)]
    split: Any = [order.split(t, 2, rank).detach().clone().requires_grad_() for t in (q, k, v)]
    if kind == "added":
        assert mask is not None
        inputs.append(mask.clone().requires_grad_())
        split.append(order.split(mask, 2, rank).clone().requires_grad_())
    mine = split[3] if kind == "added" else mask
    if kind == "boolean":
        assert mask is not None
        mine = order.split(mask, 2, rank)
    torch.manual_seed(11)
    keep = whole(kept((BATCH, HEADS.queries, ROWS, rows), P, draw_seed(rank), q.device), group, order)
    torch.manual_seed(11)
    out = context_attention(
        *split[:3], group=group, is_causal=is_causal, attn_mask=mine, dropout_p=P, method="auto", order=order
    )
    right = from_its_definition(
        *inputs[:3], is_causal=is_causal, mask=inputs[3] if kind == "added" else mask, keep=keep
    )
    rights = [right.detach(), *torch.autograd.grad(right, inputs, grad)]
    found = [out.detach(), *torch.autograd.grad(out, split, order.split(grad, 2, rank))]
    return {
        name: relative_error(a, order.split(b, 2, rank))
        for name, a, b in zip(("out", "q", "k", "v", "bias"), found, rights, strict=False)
    }


def mean_of_draws(group: dist.ProcessGroup) -> float:
    """How far the mean of many draws is from the undropped output: squared, in standard errors, its mean over all numbers."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    q, k, v, _ = (balance.split(t, 2, ranks, rank) for t in draw(1, HEADS, ranks * ROWS))
    undropped = context_attention(q, k, v, group=group, is_causal=True)
    torch.manual_seed(23)
    draws = torch.stack(
        [context_attention(q, k, v, group=group, is_causal=True, dropout_p=P) for _ in range(DRAWS)]
    )
    deviation = (draws.mean(0) - undropped) / (draws.std(0) / DRAWS**0.5)
    return (deviation**2).mean().item()


class Attention(nn.Module):
    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, enable_gqa=True, dropout_p=P)


def under_a_checkpoint(group: dist.ProcessGroup) -> list[bool]:
    """Whether output and gradients are the same, to the last bit, with and without recomputation: twice in a row, so that
    the second call's numbers are not the first's.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    module = Attention()
    wrap(module, group, ContextOptions(method="ring"))
    found: list[list[Tensor]] = []
    for run in (module, lambda *a: checkpoint(module, *a, use_reentrant=False)):
        inputs: Any = [
            balance.split(t, 2, ranks, rank).detach().requires_grad_()
            for t in draw(3, HEADS, ranks * ROWS)[:3]
        ]
        torch.manual_seed(31)
        first, second = run(*inputs), run(*inputs)
        (first + 2 * second).sum().backward()
        found.append([first.detach(), second.detach(), *(t.grad for t in inputs)])
    return [not torch.equal(found[0][0], found[0][1]), *map(torch.equal, *found)]


def at_the_ends(group: dist.ProcessGroup) -> dict[str, Any]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    q, k, v, _ = (balance.split(t, 2, ranks, rank).clone() for t in draw(3, HEADS, ranks * ROWS))
    before = torch.get_rng_state()
    same = torch.equal(
        context_attention(q, k, v, group=group, is_causal=True, dropout_p=0.0),
        context_attention(q, k, v, group=group, is_causal=True),
    )
    untouched = torch.equal(before, torch.get_rng_state())
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = context_attention(q, k, v, group=group, is_causal=True, dropout_p=1.0)
    gradients = torch.autograd.grad(out.sum(), inputs)
    messages = []
    for p in (1.5, -0.5):
        try:
            context_attention(q, k, v, group=group, is_causal=True, dropout_p=p)
        except ValueError as error:
            messages.append(str(error))
    return {
        "0": same and untouched,
        "1": all(not t.any() for t in (out, *gradients)),
        "messages": messages,
    }


def over_heads_of_tp() -> dict[str, Tensor]:
    """What is kept on a mesh of cp=2 x tp=2, where every weight is 1/8 and every value 1, with heads shared over tp or whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    module, found = Attention(is_causal=False), {}
    wrap(module, mesh["cp"])
    for name, placement in (("shared", Shard(1)), ("whole", Replicate())):
        q = DTensor.from_local(torch.ones(1, 2, 4, SIZE), mesh["tp"], [placement], run_check=False)
        torch.manual_seed(43)
        found[name] = module(q, q, q).to_local()[..., 0]
    return found


def on_four_ranks() -> dict[Any, Any]:
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}
    found: dict[Any, Any] = {}
    for ranks, group in groups.items():
        if dist.get_rank() < ranks:
            for kind, order in itertools.product(KINDS, ORDERS):
                found["errors", ranks, kind, order] = errors(group, kind, order)
            found["mean", ranks] = mean_of_draws(group)
            found["ends", ranks] = at_the_ends(group)
    group = groups[4]
    found["tp"] = over_heads_of_tp()
    found["checkpoint"] = under_a_checkpoint(group)
    found["bytes"] = bytes_sent(group, "ring", HEADS, True, dropout_p=P)
    torch.manual_seed(41)
    seeds = [draw_seed(dist.get_rank()) for _ in range(2)]
    found["drawn"] = [kept((64, 64), P, seed, torch.device("cpu")) for seed in seeds]
    found["state"] = torch.get_rng_state()
    return found


@pytest.fixture(scope="module")
def everything() -> list[dict[Any, Any]]:
    return run_ranks(on_four_ranks, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_for_what_is_drawn_outputs_and_gradients_are_exact(
    kind: str, everything: list[dict[Any, Any]]
) -> None:
    found = [e[key] for e in everything for key in e if key[0] == "errors" and key[2] == kind]
    assert len(found) == 5 * len(ORDERS)
    assert max(max(errors.values()) for errors in found) < 1e-12, found
    assert all(("bias" in errors) == (kind == "added") for errors in found)


@pytest.mark.ranks
def test_the_mean_over_draws_is_attention_without_dropout(everything: list[dict[Any, Any]]) -> None:
    """The mean of squared standard normals is 1; rows of few keys give it a spread of some tenths."""
    means = [e["mean", ranks] for e in everything for ranks in RANKS if ("mean", ranks) in e]
    assert len(means) == 5 and all(0.6 < mean < 1.5 for mean in means), means


@pytest.mark.ranks
def test_ranks_and_calls_draw_independently_and_leave_the_generator_alike(
    everything: list[dict[Any, Any]],
) -> None:
    drawn = [keep.double() for e in everything for keep in e["drawn"]]
    for keep in drawn:
        assert abs(keep.mean().item() - (1 - P)) < 0.03  # four standard deviations of 4096 draws
    for a, b in itertools.combinations(drawn, 2):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation.item()) < 4 / 64
    assert all(torch.equal(e["state"], everything[0]["state"]) for e in everything)


@pytest.mark.ranks
def test_heads_that_ranks_of_tp_share_are_drawn_apart_and_whole_ones_alike(
    everything: list[dict[Any, Any]],
) -> None:
    for first in (0, 2):  # of cp
        one, other = (everything[first + tp]["tp"] for tp in range(2))
        assert torch.equal(one["whole"], other["whole"]) and not torch.equal(one["shared"], other["shared"])
    assert not torch.equal(everything[0]["tp"]["whole"], everything[2]["tp"]["whole"])
    assert len({tuple(e["tp"]["shared"].flatten().tolist()) for e in everything}) == 4


@pytest.mark.ranks
def test_a_recomputation_draws_the_same(everything: list[dict[Any, Any]]) -> None:
    assert all(all(e["checkpoint"]) and len(e["checkpoint"]) == 6 for e in everything)


@pytest.mark.ranks
def test_none_is_dropped_at_0_and_all_at_1(everything: list[dict[Any, Any]]) -> None:
    for found in (e["ends", ranks] for e in everything for ranks in RANKS if ("ends", ranks) in e):
        assert found["0"] and found["1"]
        assert found["messages"] == ["dropout_p=1.5 is no probability", "dropout_p=-0.5 is no probability"]


@pytest.mark.ranks
def test_keys_are_gathered_once_whatever_the_method(everything: list[dict[Any, Any]]) -> None:
    assert {e["bytes"] for e in everything} == {sent("all-gather", HEADS, 4, is_causal=True, kept=True)}


def on_a_fake_world() -> tuple[int, ...]:
    enter_fake_world(4, 1)
    with torch_private.FakeTensors():
        q = torch.ones(2, 4, 8, SIZE, requires_grad=True)
        out = context_attention(q, q, q, group=dist.group.WORLD, is_causal=True, dropout_p=P)
        out.sum().backward()
        assert q.grad is not None
        return tuple(q.grad.shape)


def test_the_dry_run_needs_no_random_numbers() -> None:
    assert in_children([(on_a_fake_world,)]) == [(2, 4, 8, SIZE)]
