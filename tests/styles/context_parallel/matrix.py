"""The correctness matrix of context-parallel attention: every method, order, mask, heads and length on 1 to 4 ranks.

    python -m tests.styles.context_parallel.matrix        # all of it, and its size

Each case compares the output, the three gradients and, where rows stay on their rank, the log-sum-exp, in float64, with
attention written from its definition over the whole sequence, and wants them within 1e-12. Lengths that do not divide
are padded, and the padding is filled with noise, so that whatever leaks out of it shows.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallelizer.styles.context_parallel import masked
from parallelizer.styles.context_parallel.attention import context_attention
from parallelizer.styles.context_parallel.choice import METHODS, Heads
from parallelizer.styles.context_parallel.dealing import by_cost, per_document
from parallelizer.styles.context_parallel.order import Contiguous, Order, padded
from parallelizer.styles.context_parallel.ulysses import fits
from tests.ranks import run_ranks
from tests.styles.context_parallel.reference import masked_attention, masked_scores, relative_error

Tensor = torch.Tensor
RANKS = (1, 2, 3, 4)
HEADS = (Heads(12, 12), Heads(12, 6), Heads(8, 4), Heads(8, 1))
ORDERS = ("head-tail", "none", "per-document", "by-cost")
LENGTHS = (48, 31, 27)
"""One that divides for every number of ranks, a prime and an odd one."""
SIZE, V_SIZE, BATCH = 8, 6, 2
LIMIT = 1e-12


class Case(NamedTuple):
    ranks: int
    method: str
    order: str
    mask: str
    heads: Heads
    length: int


def draw(seed: int, heads: Heads, rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    values = value_size(heads)
    shapes = [(heads.queries, SIZE), (heads.keys, SIZE), (heads.keys, values), (heads.queries, values)]
    return [
        torch.randn(BATCH, n, rows, size, generator=generator, dtype=torch.float64).to(dtype)
        for n, size in shapes
    ]


def value_size(heads: Heads) -> int:
    """That of values: for half of the heads another than that of keys, which fused kernels do not take."""
    return V_SIZE if heads.keys in (1, 6) else SIZE


def sliding(rows: int, heads: int) -> Tensor:
    i, j = torch.arange(rows).unsqueeze(1), torch.arange(rows)
    return (j <= i) & (i - j < 3)


def prefix(rows: int, heads: int) -> Tensor:
    i, j = torch.arange(rows).unsqueeze(1), torch.arange(rows)
    return ((j <= i) | (j < 4)).expand(BATCH, 1, rows, rows)


def ids(rows: int) -> Tensor:
    """Documents of uneven length, other ones in each row of the batch."""
    ends = ([3, 4, rows // 2], [rows - 2])
    return torch.stack([sum((torch.arange(rows) >= e for e in of_row), torch.zeros(rows)) for of_row in ends])


def documents(rows: int, heads: int) -> Tensor:
    same = ids(rows).unsqueeze(2) == ids(rows).unsqueeze(1)
    return (same & torch.ones(rows, rows).tril().bool()).unsqueeze(1)


def padding(rows: int, heads: int) -> Tensor:
    """Of keys alone: one row for all."""
    keys = torch.ones(BATCH, 1, 1, rows, dtype=torch.bool)
    keys[1, ..., -3:] = False
    return keys


def of_each_head(rows: int, heads: int) -> Tensor:
    """Added, and other in every head, as ALiBi is."""
    slopes = torch.linspace(0.1, 2, heads).double().reshape(1, heads, 1, 1)
    distance = (torch.arange(rows) - torch.arange(rows).unsqueeze(1)).double()
    return (slopes * distance).masked_fill(distance > 0, float("-inf"))


MASKS: dict[str, Callable[[int, int], Tensor]] = {
    f.__name__: f for f in (sliding, prefix, documents, padding, of_each_head)
}


def cases(ranks: Iterable[int] = RANKS) -> list[Case]:
    """All that go together: Ulysses needs heads that divide."""
    every = itertools.product(ranks, (*METHODS, "auto"), ORDERS, ("causal", "none", *MASKS), HEADS, LENGTHS)
    return [case for case in map(Case._make, every) if possible(case.method, case.heads, case.ranks)]


def possible(method: str, heads: Heads, ranks: int) -> bool:
    """Whether a method can deal these heads out."""
    return method != "ulysses" or fits(*heads, ranks)


def order_of(case: Case, rows: int) -> Order:
    """The order of a padded sequence of `rows`."""
    length = case.length if rows != case.length else None
    if case.ranks == 1:
        return Order(1, length)
    if case.order == "per-document":
        return per_document(padded(ids(case.length), 1, rows), case.ranks, length)
    if case.order == "by-cost":
        noise = torch.rand(rows, generator=torch.Generator().manual_seed(rows))
        return by_cost(noise, case.ranks, length)
    return (Contiguous if case.order == "none" else Order)(case.ranks, length)


def errors(case: Case, group: dist.ProcessGroup, **options: Any) -> dict[str, float]:
    """By tensor, the relative error of this rank's rows; `options` are those of a method."""
    ranks, rank, real = case.ranks, dist.get_rank(group), case.length
    rows = -(-real // (2 * ranks)) * 2 * ranks if ranks > 1 else real
    order = order_of(case, rows)
    *tensors, grad = draw(len(case.mask), case.heads, rows)
    grad[:, :, real:] = 0  # nobody asks for what stands in the padding
    full = MASKS[case.mask](real, case.heads.queries) if case.mask in MASKS else None
    inputs: Any = [t[:, :, :real].clone().requires_grad_() for t in tensors]
    right = masked_attention(*inputs, mask=full, is_causal=case.mask == "causal", scale=SIZE**-0.5)
    rights = [right.detach(), *torch.autograd.grad(right, inputs, grad[:, :, :real])]
    mine: Any = [order.split(t, 2, rank).detach().clone().requires_grad_() for t in tensors]
    local = full
    if full is not None and full.size(-2) > 1:
        local = order.split(
            padded(full, full.ndim - 2, rows).expand(BATCH, 1 if full.ndim < 4 else -1, -1, -1), 2, rank
        )
    out = context_attention(
        *mine, group=group, is_causal=case.mask == "causal", method=case.method, attn_mask=local,
        order=order, **options,
    )  # fmt: skip
    saved = getattr(out.grad_fn, "saved_tensors", ())
    grads = torch.autograd.grad(out, mine, order.split(grad, 2, rank))
    known = order.split(torch.arange(rows).expand(BATCH, 1, rows), 2, rank).unsqueeze(-1) < real
    found = {}
    for name, value, whole in zip(("out", "q", "k", "v"), (out.detach(), *grads), rights, strict=True):
        expected = order.split(padded(whole, 2, rows), 2, rank)
        found[name] = relative_error(torch.where(known, value, 0.0) if name == "out" else value, expected)
    if saved and saved[-1].shape == (
        1,
        *out.shape[:3],
    ):  # of other rows in Ulysses
        scores = masked_scores(*inputs[:2], mask=full, is_causal=case.mask == "causal", scale=SIZE**-0.5)
        lse = order.split(padded(scores.logsumexp(-1).detach(), 2, rows), 2, rank)
        found["lse"] = relative_error(torch.where(known[..., 0], saved[-1][0], 0.0), lse)
    return found


def worst_of(chosen: list[Case]) -> dict[Case, float]:
    """The largest error of each case, of all tensors and ranks."""

    def on_four_ranks() -> dict[Case, float]:
        masked.STEP, masked.TILE = 2, 7  # in this child: so that short sequences have several tiles
        groups = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}
        return {
            case: max(errors(case, groups[case.ranks]).values())
            for case in chosen
            if dist.get_rank() < case.ranks
        }

    found = run_ranks(on_four_ranks, max(RANKS))
    return {case: max(of_rank[case] for of_rank in found if case in of_rank) for case in chosen}


def main() -> int:
    """Run every case and print what came out."""
    parser = argparse.ArgumentParser(
        "python -m tests.styles.context_parallel.matrix", description="Context parallelism, exact."
    )
    parser.add_argument("--every", type=int, default=1, help="one case of so many")
    asked = parser.parse_args()
    worst = worst_of(cases()[:: asked.every])
    wrong = {case: error for case, error in worst.items() if not error < LIMIT}
    for case, error in wrong.items():
        print(f"{error:.1e}  {case}")
    largest = max(worst.values())
    print(
        f"{len(worst) - len(wrong):,} of {len(worst):,} cases within {LIMIT:g} of attention written out (worst {largest:.1e}): "
        f"{len(METHODS) + 1} methods x {len(ORDERS)} orders x {len(MASKS) + 2} masks x {len(HEADS)} heads x "
        f"{len(LENGTHS)} lengths on {', '.join(map(str, RANKS))} ranks, where heads divide"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
