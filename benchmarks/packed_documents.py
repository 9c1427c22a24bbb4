"""Packed documents of uneven length: dealt out per document, by cost, head-tail and contiguous, side by side in the same ranks.

    python benchmarks/packed_documents.py [--ranks 2] [--rows 8192] [--batch 2] [--median 400] [--rounds 7] [--seed 0]

One call of attention over the documents, forward and backward, one thread a rank, in float32, as a batch of the run gives them:
without the elements of a mask. Dealt out per document it is also measured with a dense mask. Lengths are drawn from a
long-tailed (log-normal, sigma 1.2) mix, other ones in each row of the batch. The limit is the time of all documents on one
rank over the number of ranks, taken while every rank runs it. `work` is the largest rank's share of visible pairs over the
mean, `mask` the bytes of a mask on a rank. Every round measures all; the time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.plot import bars
from benchmarks.turns import Times, compared, in_turns
from parallelizer.runtime.launch import launcher as launch
from parallelizer.styles.context_parallel import document_mask as documents_of
from parallelizer.styles.context_parallel.attention import context_attention
from parallelizer.styles.context_parallel.dealing import by_cost, document_mask, per_document
from parallelizer.styles.context_parallel.masked import attend
from parallelizer.styles.context_parallel.order import Contiguous, Order

Tensor = torch.Tensor
HEADS, KEY_HEADS, SIZE = 8, 2, 64
DENSE = "dense mask"
"""Behind the name of an order: with the elements of the mask."""


def documents(batch: int, rows: int, median: int, seed: int) -> Tensor:
    """Ids [batch, rows] of documents whose lengths are long-tailed."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(batch, rows, dtype=torch.int64)
    for row in ids:
        begin = number = 0
        while begin < rows:
            length = max(8, int(median * torch.exp(1.2 * torch.randn((), generator=generator))))
            row[begin : begin + length] = number
            begin, number = begin + length, number + 1
    return ids


def orders(ids: Tensor, ranks: int) -> dict[str, Order]:
    """Every way to deal these documents out."""
    cost = document_mask(ids, torch.arange(ids.size(1))).sum((0, 1, 3))
    return {
        "per document": per_document(ids, ranks),
        "by cost": by_cost(cost, ranks),
        "head-tail": Order(ranks),
        "contiguous": Contiguous(ranks),
    }


def work(ids: Tensor, order: Order) -> float:
    """The largest rank's visible pairs over the mean."""
    shares = [
        int(document_mask(ids, order.positions(ids.size(1), rank)).sum()) for rank in range(order.ranks)
    ]
    return max(shares) * order.ranks / sum(shares)


def against(found: Sequence[Times], way: str, other: str) -> list[float]:
    """Quartiles of how many times faster one way is than another, turn by turn."""
    slowest = [[max(turn) for turn in zip(*(f[name] for f in found), strict=True)] for name in (other, way)]
    return statistics.quantiles((b / a for b, a in zip(*slowest, strict=True)), n=4)


def rank(ids: Tensor, rounds: int) -> Times:
    """By what was measured, this rank's seconds of each round."""
    torch.set_num_threads(1)
    group, ranks, me = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    batch, rows = ids.shape
    whole = [
        torch.randn(batch, n, rows, SIZE, generator=generator) for n in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    ]
    everything = documents_of.made(ids, torch.arange(rows), torch.device("cpu"))

    def alone() -> None:
        inputs = [t.detach().requires_grad_() for t in whole[:3]]
        out = attend(*inputs, mask=everything, is_causal=False, scale=SIZE**-0.5)
        torch.autograd.grad(out, inputs, whole[3])

    def sharded(order: Order, *, dense: bool = False) -> Callable[[], None]:
        local = [order.split(t, 2, me) for t in whole]
        positions = order.positions(rows, me)
        made = documents_of.made(ids, positions, torch.device("cpu"))
        mask = document_mask(ids, positions) if dense else made

        def call() -> None:
            inputs: Any = [t.detach().requires_grad_() for t in local[:3]]
            out = context_attention(*inputs, group=group, is_causal=False, attn_mask=mask, order=order)
            torch.autograd.grad(out, inputs, local[3])

        return call

    made = orders(ids, ranks)
    calls = {"unsharded": alone, **{name: sharded(order) for name, order in made.items()}}
    calls[f"per document, {DENSE}"] = sharded(made["per document"], dense=True)
    return in_turns(calls, rounds)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--median", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="an SVG to write")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ids = documents(asked.batch, asked.rows, asked.median, asked.seed)
    found = launch.start(rank, (ids, asked.rounds), ranks=asked.ranks, device="cpu")
    limit, ways = compared(found, f"per document, {DENSE}")
    counts = ", ".join(str(int(row.max()) + 1) for row in ids)
    print(
        f"{asked.batch} x {asked.rows} rows of {counts} documents, {asked.ranks} ranks, torch {torch.__version__}"
    )
    heads = f"{'seconds':>9}{'of the limit':>14}{'quartiles':>20}{'work':>7}{'mask':>11}{'against dense':>15}{'quartiles':>16}"
    print(f"{'':26}{heads}")
    print(f"{'limit':26}{limit:9.3f}")
    made, plotted = orders(ids, asked.ranks), {}
    for way in ways:
        low, middle, high = plotted[way.name] = way.share
        spread = f"{low:.1f} to {high:.1f} %"
        order, _, dense = way.name.partition(", ")
        uneven = work(ids, made[order])
        held = ids.numel() * ids.size(1) // asked.ranks if dense else 0
        slow, ratio, fast = against(found, way.name, f"per document, {DENSE}")
        print(
            f"{way.name:26}{way.seconds:9.3f}{middle:12.1f} %{spread:>20}{uneven:7.3f}{held:11,}{ratio:13.2f} x"
            f"{f'{slow:.2f} to {fast:.2f}':>16}"
        )
    if asked.plot:
        note = (
            f"{asked.batch} x {asked.rows} rows of {counts} documents; 100 %: one rank's time / {asked.ranks}"
        )
        bars(asked.plot, f"Packed documents on {asked.ranks} ranks, one core each", note, plotted)


if __name__ == "__main__":
    main()
