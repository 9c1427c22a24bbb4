"""Orders that follow from a batch: which rows a rank holds so that all have equal work under the batch's own masks.

A row's cost is the number of keys that it sees. Under a causal mask over the whole sequence head-tail order is even; over
packed documents it is not, and under a mask of any other form neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from parallelizer import torch_private
from parallelizer.language.plan import Buffer, Plan
from parallelizer.styles.context_parallel import balance
from parallelizer.styles.context_parallel.order import Dealt, Order, padded, static_order

Tensor = torch.Tensor


def order_for(
    batch: Mapping[str, Tensor], split: Mapping[str, Buffer], plan: Plan, ranks: int, tp: int = 1
) -> tuple[Order, int]:
    """The order in which a batch is dealt out over `ranks`, as the plan's `balance` says, and the rows of its sequence, with
    padding.

    `split` are the entries that carry the sequence. With an encoder and a decoder, of other lengths, the order is one that
    needs no batch. So it is where there are no values to go by, as in a dry run: what each rank holds and sends is the
    same. Raises ValueError for a balance that goes by something that the batch has not.
    """
    lengths = {batch[name].size(buffer.dim or 0) for name, buffer in split.items()}
    if ranks == 1 or len(lengths) != 1:
        return static_order(plan.balance, ranks), next(iter(lengths), 0)
    (rows,) = lengths
    parts, length = math.lcm(2 * ranks, ranks * tp), None
    if rows % parts and any(buffer.pad is not None for buffer in split.values()):
        length, rows = rows, -(-rows // parts) * parts
    documents = next((n for n, b in split.items() if b.documents), None)
    mask = next((n for n, b in split.items() if batch[n].dtype == torch.bool and batch[n].ndim > 2), None)
    said = plan.balance
    if said == "auto" and documents is not None:
        # A table of the model's own has one order for all rows of the batch.
        said = "by-cost" if plan.buffers and batch[documents].size(0) > 1 else "per-document"
    goes_by = documents if documents is not None or said == "per-document" else mask
    if said not in ("per-document", "by-cost"):
        return static_order(said, ranks, length), rows
    if goes_by is None:
        wanted = "an entry with `documents: true`" + (" or a boolean mask" if said == "by-cost" else "")
        raise ValueError(f"`balance: {said}` goes by {wanted} in the batch, and there is none")
    if not torch_private.has_values(batch[goes_by]):
        return static_order(said, ranks, length), rows
    dim = split[goes_by].dim or 0
    whole = padded(batch[goes_by], dim, rows, split[goes_by].pad)
    if said == "per-document":
        return per_document(whole, ranks, length), rows
    cost = _within(whole).sum(0) + 1 if goes_by == documents else whole.movedim(dim, 0).flatten(1).sum(1)
    return by_cost(cost, ranks, length), rows


def per_document(documents: Tensor, ranks: int, length: int | None = None) -> Dealt:
    """Head-tail within each document: of its 2W chunks, rank r gets the r-th and the r-th from the end.

    `documents` [batch, P] are ids, the same for neighbours of one document; each row of the batch is distributed
    separately. The last rows of a document that 2W does not divide, fewer than 2W, go to the ranks with fewest rows, so that
    all ranks hold P/W rows. P must be a multiple of W. `length` is the number of rows without padding.
    """
    balance.check_length(documents.size(1), ranks)
    dealt = torch.stack([_of_documents(row, ranks) for row in documents.cpu()])
    return Dealt(ranks, length, dealt, "per-document")


def _of_documents(ids: Tensor, ranks: int) -> Tensor:
    """[W, P/W] for one row of the batch."""
    begins = torch.cat([torch.ones(1, dtype=torch.bool), ids[1:] != ids[:-1]]).nonzero().flatten().tolist()
    held: list[list[Tensor]] = [[] for _ in range(ranks)]
    rest: list[int] = []
    for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
        size = (end - begin) // (2 * ranks)
        for rank in range(ranks):
            for chunk in (rank, 2 * ranks - 1 - rank):
                held[rank].append(torch.arange(begin + chunk * size, begin + (chunk + 1) * size))
        rest += range(begin + 2 * ranks * size, end)
    share = len(ids) // ranks
    mine = [torch.cat(parts) for parts in held]
    # Every rank has as many so far; the rest are dealt round and back again, so that no rank has all the last rows.
    missing = share - len(mine[0])
    more: list[list[int]] = [[] for _ in range(ranks)]
    for turn in range(missing):
        there = range(ranks) if turn % 2 == 0 else reversed(range(ranks))
        for place, rank in enumerate(there):
            more[rank].append(rest[turn * ranks + place])
    every = [torch.cat([m, torch.tensor(o, dtype=torch.int64)]) for m, o in zip(mine, more, strict=True)]
    return torch.stack([rows.sort().values for rows in every])


def by_cost(cost: Tensor, ranks: int, length: int | None = None, chunk: int = 128) -> Dealt:
    """Chunks of neighbours, the dearest first, dealt round the ranks and back again; the same for all rows of the batch.

    `cost` [P] is the number of keys that a row sees, summed over the batch. P must be a multiple of 2W; chunks are of
    `chunk` rows, or of as many fewer as it takes to give every rank at least four.
    """
    rows = len(cost)
    balance.check_length(rows, ranks)
    size = max(d for d in range(1, max(1, min(chunk, rows // (4 * ranks))) + 1) if rows % (ranks * d) == 0)
    chunks = torch.arange(rows).view(-1, size)
    dearest = cost.cpu().double().view(-1, size).sum(1).argsort(descending=True, stable=True)
    held: list[list[int]] = [[] for _ in range(ranks)]
    for turn, of_turn in enumerate(dearest.view(-1, ranks).tolist()):
        for place, which in enumerate(of_turn):
            held[place if turn % 2 == 0 else ranks - 1 - place].append(which)
    dealt = torch.stack([chunks[sorted(mine)].flatten() for mine in held])
    return Dealt(ranks, length, dealt.unsqueeze(0), "by-cost")


def document_mask(documents: Tensor, rows: Tensor) -> Tensor:
    """Who sees whom in packed documents, causally: bool [batch, 1, rows, S], for the `rows` of the whole sequence, int64 [rows]
    or [batch, rows]. A position behind the last one, padding, sees itself's predecessors of the last document, so that no
    row is empty.
    """
    batch, length = documents.shape
    rows = rows.to(documents.device).expand(batch, -1)
    of_rows = documents.gather(1, rows.clamp(max=length - 1))
    columns = torch.arange(length, device=documents.device)
    same = of_rows.unsqueeze(2) == documents.unsqueeze(1)
    return (same & (columns <= rows.unsqueeze(2))).unsqueeze(1)


def _within(documents: Tensor) -> Tensor:
    """The position of each token in its own document, int64 [batch, S]: one less than the keys that it sees."""
    at = torch.arange(documents.size(1), device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return at - torch.where(first, at, 0).cummax(1).values
