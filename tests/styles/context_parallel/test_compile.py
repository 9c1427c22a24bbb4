"""`torch.compile` of a block with context-parallel attention in it: the same outputs and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.styles.context_parallel.choice import METHODS
from parallelizer.styles.context_parallel.intercept import ContextParallelError
from parallelizer.styles.context_parallel.public import context_parallel, shard_buffers
from tests.chosen import a_fifth
from tests.ranks import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def worst_difference(method: str, masked: bool) -> float:
    """Between the block and the compiled block, of the output and every gradient."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    block, whole = Block().double(), torch.randn(2, 16, 32, dtype=torch.float64)
    context_parallel(block, group, method=method)
    rows = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    local = shard_buffers({"x": whole, "mask": rows}, {"x": 1, "mask": 2}, group)
    found = []
    for callee in (block, torch.compile(block, backend="aot_eager")):
        block.zero_grad()
        out = callee(local["x"], local["mask"] if masked else None)
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad.clone() for p in block.parameters() if p.grad is not None)])
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("method", a_fifth(METHODS))
def test_a_compiled_block_computes_the_same(method: str) -> None:
    masked = METHODS.index(method) % 2 == 1
    assert max(run_ranks(lambda: worst_difference(method, masked), 2)) < 1e-12


class Outer(nn.Module):
    """Has a part of it compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.block.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


@pytest.mark.ranks
def test_what_would_be_taken_twice_or_escape_is_refused() -> None:
    def worker() -> list[str]:
        group, found = dist.group.WORLD, []
        assert group is not None
        inner, parent = Block(), nn.Sequential()
        context_parallel(inner, group)
        context_parallel(parent, group)
        parent.append(inner)  # after both were wrapped: nobody can see it before it runs
        compiled = Outer()
        context_parallel(compiled, group)
        for module in (parent, compiled):
            with pytest.raises(ContextParallelError) as refused:
                module(torch.randn(2, 8, 32))
            found.append(str(refused.value))
        inner(torch.randn(2, 8, 32))  # nothing stays behind
        return found

    for nested, escaped in run_ranks(worker, 2):
        assert "Block: runs inside Sequential, which is context-parallel too" in nested
        assert "Outer: attention was called in a function or a part of it that torch.compile made" in escaped
