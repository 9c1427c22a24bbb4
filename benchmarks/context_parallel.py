"""Context-parallel attention against the hardware's limit and against torch's ring, side by side in the same ranks.

    python benchmarks/context_parallel.py [--ranks 2] [--rows 8192] [--heads 8] [--key-heads 2] [--rounds 7]

One call, causal, forward and backward, one thread a rank, in float32. The limit is the time of the unsharded kernel over the
number of ranks, taken while every rank runs it, so that both sides share memory and clock. `contiguous` is the same code
on neighbouring rows instead of head and tail: the last rank has (2W-1)/W of its share, so W/(2W-1) of the limit is
all it can reach. torch's ring is its own template, driven with the CPU operators that it lacks. Every round measures all;
the time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as peer

from benchmarks.plot import bars
from benchmarks.turns import Times, compared, in_turns
from parallelizer.runtime.launch import launcher as launch
from parallelizer.styles.context_parallel import balance
from parallelizer.styles.context_parallel.attention import context_attention
from parallelizer.styles.context_parallel.choice import Heads, best_degree
from parallelizer.styles.context_parallel.kernels import block_backward, block_forward
from parallelizer.styles.context_parallel.order import Contiguous
from parallelizer.styles.context_parallel.ulysses import fits

Tensor = torch.Tensor
SIZE = 64


def unsharded(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    scale = SIZE**-0.5
    out, lse = block_forward(q, k, v, is_causal=True, scale=scale)
    block_backward(grad, q, k, v, out, lse, is_causal=True, scale=scale)


def ours(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, **options: Any) -> None:
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    torch.autograd.grad(context_attention(*inputs, is_causal=True, **options), inputs, grad)


def theirs(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, group: dist.ProcessGroup) -> None:
    scale = SIZE**-0.5
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, lse = peer._templated_ring_attention(group, 2, forward, q, k, v, True, dropout_p=0.0, scale=scale)[
        :2
    ]
    peer._templated_ring_attention_backward(
        group, 2, backward, grad, "grad_out", q, k, v, out, lse, True, dropout_p=0.0, scale=scale
    )


def rank(rows: int, heads: Heads, rounds: int) -> Times:
    """By what was measured, this rank's seconds of each round."""
    torch.set_num_threads(1)
    group, ranks, me = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, n, rows, SIZE, generator=generator)
        for n in (heads.queries, *[heads.keys] * 2, heads.queries)
    ]
    local = [balance.split(t, 2, ranks, me) for t in whole]
    calls: dict[str, Callable[[], None]] = {
        "unsharded": lambda: unsharded(*whole),
        "all-gather": lambda: ours(*local, group=group),
        "all-gather, kept": lambda: ours(*local, group=group, keep_gathered=True),
        "ring": lambda: ours(*local, group=group, method="ring"),
        "contiguous": lambda: ours(*local, group=group, order=Contiguous(ranks)),
        "torch's ring": lambda: theirs(*local, group),
    }
    if fits(*heads, ranks):
        calls["ulysses"] = lambda: ours(*local, group=group, method="ulysses")
    if 1 < (degree := best_degree(heads, ranks)) < ranks:
        calls[f"ulysses-ring, {degree}"] = lambda: ours(*local, group=group, method="ulysses-ring")
    return in_turns(calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plot", type=Path, help="an SVG to write")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    heads = Heads(asked.heads, asked.key_heads)
    found = launch.start(rank, (asked.rows, heads, asked.rounds), ranks=asked.ranks, device="cpu")
    limit, ways = compared(found, "torch's ring")
    shape = f"{asked.rows} rows, {heads.queries} query and {heads.keys} key heads of {SIZE}"
    print(f"{shape}, {asked.ranks} ranks, torch {torch.__version__}")
    print(f"{'':18}{'seconds':>9}{'of the limit':>14}{'quartiles':>20}{'against torch':>15}")
    print(f"{'limit':18}{limit:9.3f}")
    plotted = {}
    for way in ways:
        low, middle, high = plotted[way.name] = way.share
        spread = f"{low:.1f} to {high:.1f} %"
        print(f"{way.name:18}{way.seconds:9.3f}{middle:12.1f} %{spread:>20}{way.faster:13.2f} x")
    if asked.plot:
        note = f"causal, forward and backward, {shape}; 100 %: unsharded time / {asked.ranks}"
        bars(asked.plot, f"Context-parallel attention on {asked.ranks} ranks, one core each", note, plotted)


if __name__ == "__main__":
    main()
