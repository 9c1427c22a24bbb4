"""Packed documents as calls of `varlen`: which neighbouring rows see which neighbouring keys. No communication.

A rank's rows are a few parts of each document. In a part of neighbouring rows, a *run*, the last row sees the keys from the
beginning of its document to itself, and each row before it sees one key less. So a run is a sequence of `varlen`. Two runs of
a document see the same first keys, and each has a copy of them. A call has at most as many keys as the whole sequence, so that
the copies of one call are bounded.

The documents are read on the host. What a kernel needs of them is copied to its device once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from parallelizer import torch_private
from parallelizer.styles.context_parallel.to_device import to_device
from parallelizer.styles.context_parallel.varlen import Sequences

Tensor = torch.Tensor


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel: neighbouring rows of the queries, and the keys that they see, by a slice or by int32 positions."""

    rows: slice
    keys: slice | Tensor
    sequences: Sequences


@dataclass(frozen=True)
class RowRun:
    """How many neighbouring rows, and the keys that the last of them sees."""

    rows: int
    keys: slice


def are_packed(documents: Tensor) -> bool:
    """Whether each document of [batch, S] on the host is a stretch of neighbours: none goes on after another one."""
    changes = (documents[:, 1:] != documents[:, :-1]).sum(1).tolist()
    return all(len(row.unique()) == 1 + number for row, number in zip(documents, changes, strict=True))


def runs_of(documents: Tensor, rows: Tensor) -> list[RowRun]:
    """The runs of a rank's `rows` of one row of the batch: documents [S] and positions [R], ascending, both on the host. A
    position behind the last one, padding, sees all of the last document.
    """
    at = torch.arange(len(documents))
    first = torch.ones_like(at, dtype=torch.bool)
    first[1:] = documents[1:] != documents[:-1]
    begins = torch.where(first, at, 0).cummax(0).values
    seen = rows.clamp(max=len(documents) - 1)
    begin, end = begins[seen], seen + 1
    new = torch.ones_like(seen, dtype=torch.bool)
    new[1:] = (begin[1:] != begin[:-1]) | (end[1:] != end[:-1] + 1)
    starts = new.nonzero().flatten()
    stops = torch.cat([starts[1:], torch.tensor([len(rows)])])
    last = stops - 1
    return [
        RowRun(rows, slice(key, stop))
        for rows, key, stop in zip(
            (stops - starts).tolist(), begin[last].tolist(), end[last].tolist(), strict=True
        )
    ]


def calls_of(documents: Tensor, rows: Tensor, device: torch.device) -> list[list[KernelCall]]:
    """For each row of the batch, the calls that its attention comes to, with tensors on `device`. `documents` [batch, S] are on
    the host, `rows` [R] or [batch, R] are the positions of the queries, ascending.

    Documents without values, as in a dry run, count as one, whose last rows are a rank's.
    """
    batch, length = documents.shape
    rows = rows.expand(batch, -1)
    if not torch_private.has_values(documents):
        return [[_of_one_document(documents, rows.size(1), device)] for _ in range(batch)]
    groups = [_groups(runs_of(*each), length) for each in zip(documents, rows.cpu(), strict=True)]
    # One copy to the device for all calls.
    parts = [part for of_row in groups for group in of_row for part in _numbers(group)]
    numbers = iter(to_device(torch.cat(parts), device).split([len(part) for part in parts]))
    found = []
    for of_row in groups:
        at, calls = 0, []
        for group in of_row:
            queries, keys = (
                tuple(run.rows for run in group),
                tuple(run.keys.stop - run.keys.start for run in group),
            )
            sequences = Sequences(queries, keys, next(numbers), next(numbers))
            positions = next(numbers)
            calls.append(KernelCall(slice(at, at + sum(queries)), _stretch(group) or positions, sequences))
            at += sum(queries)
        found.append(calls)
    return found


def _groups(runs: list[RowRun], most: int) -> list[list[RowRun]]:
    """Neighbouring runs with at most so many keys together."""
    groups: list[list[RowRun]] = []
    keys = 0
    for run in runs:
        more = run.keys.stop - run.keys.start
        if not groups or keys + more > most:
            groups.append([])
            keys = 0
        groups[-1].append(run)
        keys += more
    return groups


def _stretch(group: list[RowRun]) -> slice | None:
    """The keys of all runs, if those of each begin where those of the run before end."""
    if any(a.keys.stop != b.keys.start for a, b in itertools.pairwise(group)):
        return None
    return slice(group[0].keys.start, group[-1].keys.stop)


def _numbers(group: list[RowRun]) -> tuple[Tensor, Tensor, Tensor]:
    """Where the queries and the keys of each run begin, and the positions of the keys; none where a slice says it."""
    queries = torch.tensor([0, *(run.rows for run in group)], dtype=torch.int32)
    keys = torch.tensor([0, *(run.keys.stop - run.keys.start for run in group)], dtype=torch.int32)
    stretches = [] if _stretch(group) else [torch.arange(run.keys.start, run.keys.stop) for run in group]
    positions = torch.cat(stretches).int() if stretches else queries[:0]
    return queries.cumsum(0).int(), keys.cumsum(0).int(), positions


def _of_one_document(documents: Tensor, rows: int, device: torch.device) -> KernelCall:
    length = documents.size(1)
    begins, positions = (documents.new_empty(n, dtype=torch.int32, device=device) for n in (2, length))
    sequences = Sequences((rows,), (length,), begins, begins)
    return KernelCall(slice(0, rows), slice(0, length) if rows == length else positions, sequences)
