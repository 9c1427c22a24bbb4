"""Context parallelism in a loop of one's own: an encoder without a mask, and a decoder that attends across."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import parallelizer as pz
from tests.ranks import run_ranks
from tests.styles.context_parallel.reference import relative_error

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """Self-attention, or attention across to a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None, is_causal: bool = False) -> Tensor:
        source = x if memory is None else memory
        q, k, v = (
            f(t).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, source), (self.v, source))
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        result: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return result


class Encoder(nn.Module):
    """Patches with learned positions, as a ViT has them."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.patch, self.places = nn.Linear(12, WIDTH), nn.Embedding(patches, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        x = self.patch(patches) + self.places(places)
        for block in self.blocks:
            x = x + block(F.layer_norm(x, (WIDTH,)))
        return x


class Translator(nn.Module):
    """An encoder, and a decoder whose tokens are fewer."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.encoder, self.tokens = Encoder(patches), nn.Embedding(10, WIDTH)
        self.inner, self.across, self.head = Attention(), Attention(), nn.Linear(WIDTH, 10)

    def forward(self, patches: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        memory, x = self.encoder(patches, places), self.tokens(tokens)
        x = x + self.inner(x, is_causal=True)
        result: Tensor = self.head(x + self.across(x, memory))
        return result


def train(method: str) -> dict[str, float]:
    """The relative error of the logits and of every gradient against one rank."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = Translator(24).double()
    batch = {
        "patches": torch.randn(2, 24, 12).double(),
        "places": torch.arange(24).expand(2, -1),
        "tokens": torch.randint(0, 10, (2, 8)),
        "labels": torch.randint(0, 10, (2, 8)),
    }
    labels = batch.pop("labels")
    right = model(**batch)
    F.cross_entropy(right.flatten(0, 1), labels.flatten()).backward()
    rights = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()

    attentions = [m for m in model.modules() if isinstance(m, Attention)]
    pz.context_parallel(attentions, mesh, method=method)
    local = pz.shard_buffers({**batch, "labels": labels}, dict.fromkeys((*batch, "labels"), 1), mesh)
    own = local.pop("labels")
    logits = model(**local)
    F.cross_entropy(logits.flatten(0, 1), own.flatten()).backward()
    errors = {"logits": relative_error(pz.unshard(logits, mesh), right.detach())}
    for name, param in model.named_parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad)
        errors[name] = relative_error(param.grad / ranks, rights[name])  # type: ignore[arg-type]
    return errors


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {
        method: train(method) for method in ("all-gather", "ring", "ulysses", "ulysses-ring", "auto")
    }
    mesh, module = init_device_mesh("cpu", (2,)), Attention()
    twice = Attention()
    pz.context_parallel(twice, mesh)
    messages = []
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    for call in (
        lambda: pz.context_parallel(module, mesh, method="rings"),
        lambda: pz.context_parallel([module, twice], mesh),
        lambda: pz.context_parallel(module, grid),
        lambda: pz.shard_buffers({"ids": torch.zeros(2, 8)}, {"labels": 1}, mesh),
        lambda: pz.shard_buffers({"ids": torch.zeros(2, 6)}, {"ids": 1}, mesh),
        lambda: pz.shard_buffers({"ids": torch.zeros(2, 8)}, {"ids": 5}, mesh),
        lambda: pz.context_parallel([], mesh),
        lambda: pz.context_parallel(["layers.0"], mesh),  # type: ignore[list-item]
        lambda: pz.context_parallel([nn.Sequential(module), module], mesh),
        lambda: pz.context_parallel(nn.Sequential(twice), mesh),
        lambda: pz.context_parallel(module, mesh, method="ring", ulysses_degree=2),
        lambda: pz.context_parallel(module, mesh, method="ulysses-ring", ulysses_degree=3),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    found["messages"], found["left as it was"] = messages, "forward" not in vars(module)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(everything, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["all-gather", "ring", "ulysses", "ulysses-ring", "auto"])
def test_an_encoder_and_a_decoder_across_train_as_on_one_rank(
    method: str, results: list[dict[str, Any]]
) -> None:
    for found in results:
        big = {
            n: e for n, e in found[method].items() if not n.endswith("k.bias")
        }  # softmax has no gradient for those
        assert max(big.values()) < 1e-12, big


@pytest.mark.ranks
def test_what_cannot_be_is_told_and_leaves_every_module_as_it_was(results: list[dict[str, Any]]) -> None:
    for found in results:
        method, again, axes, missing, odd, dim, nothing, text, nested, around, ring, degree = found[
            "messages"
        ]
        assert "there is no method 'rings'" in method
        assert "context-parallel already" in again
        assert "several axes and none called cp" in axes
        assert "labels is not among ids" in missing
        assert "a sequence of 6 rows" in odd
        assert "ids has 2 dimensions, and 5 is none of them" in dim
        assert "there are no modules" in nothing
        assert "'layers.0' is a str, not a torch.nn.Module" in text
        assert "one of the modules, Attention, is inside another" in nested
        assert "0 inside Sequential is context-parallel already" in around
        assert "ulysses_degree is an option of ulysses-ring, and not of ring" in ring
        assert "ulysses_degree=3 does not divide the 2 ranks" in degree
        assert found["left as it was"]
