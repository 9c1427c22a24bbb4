"""The order of a sequence: which rows each rank of an axis holds.

A sequence of S rows is padded to P, a multiple of 2W for W ranks, and every rank holds P/W of them, sorted by
their positions. An order splits whole tensors, joins parts, and knows which keys a rank's rows see under a
causal mask. Padding is after the last row; `length` is the number of real rows.

    head-tail     chunk r and chunk 2W-1-r of 2W: equal work under a causal mask (`balance`)
    none          the r-th W-th: work grows with the rank, (2r+1)/W^2 of the whole
    dealt         any rows, other ones in each row of the batch: per document, or by cost (`dealing`)

Nothing in this file communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from parallelizer.styles.context_parallel import balance
from parallelizer.styles.context_parallel.balance import Block
from parallelizer.styles.context_parallel.to_device import to_device

Tensor = torch.Tensor


@dataclass(frozen=True)
class Order:
    """Head-tail order over `ranks`. `length` is None where every row is real: a sequence of any length that divides."""

    ranks: int
    length: int | None = None

    name = "head-tail"
    varies = False
    """Whether rows of the batch are dealt out each in its own way."""

    def positions(self, rows: int, rank: int, device: torch.device | None = None) -> Tensor:
        """The positions of the rows that `rank` holds of a sequence of `rows`, padding included, ascending: int64 [rows / W],
        or [batch, rows / W] where they differ. On `device`, or on the host; no layer makes the host wait for a copy.
        """
        return balance.local_positions(rows, self.ranks, rank, device)

    def split(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        """The rows along `dim` that `rank` holds, a contiguous copy; the tensor itself for one rank. Differentiable.

        Raises ValueError for a number of rows that is not dealt out evenly.
        """
        return balance.split(tensor, dim, self.ranks, rank)

    def split_into(self, part: Tensor, tensor: Tensor, dim: int, rank: int) -> None:
        """Copies the rows that `rank` holds, of whatever dtype, into `part`, without another copy where that can be."""
        chunks = tensor.chunk(2 * self.ranks, dim)
        for half, chunk in zip(part.chunk(2, dim), balance.chunks_of(self.ranks, rank), strict=True):
            half.copy_(chunks[chunk])

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Undoes `split`: all rows, with padding, in their original order. Differentiable."""
        return parts[0] if self.ranks == 1 else balance.unsplit_parts(parts, dim)

    def blocks(
        self, rows: int, rank: int, *, is_causal: bool, keys: int | None = None
    ) -> tuple[Block, ...] | None:
        """What attention of a rank's `rows` rows against all keys comes to; None if only a mask can say it."""
        if is_causal or self.length is None:
            return balance.blocks(rows, self.ranks, rank, is_causal=is_causal, local_keys=keys)
        return (Block(slice(0, rows), slice(0, self.length), False),)

    def seen(
        self, rank: int, source: int, rows: int, keys: int, *, is_causal: bool
    ) -> tuple[slice, slice] | None:
        """Which of its rows `rank` needs for the keys that `source` holds, and which of those they see; None for none."""
        if is_causal and source != rank:
            if source < rank:
                return slice(0, rows), slice(0, keys // 2)
            return slice(rows // 2, rows), slice(0, keys)
        return slice(0, rows), slice(0, keys if is_causal else self.real(source, keys))

    def real(self, rank: int, rows: int) -> int:
        """How many of a rank's rows are no padding: the first ones."""
        if self.length is None:
            return rows
        return int((self.positions(rows * self.ranks, rank) < self.length).sum())

    def of_rows(self, start: int, size: int) -> Order:
        """The order of some rows of the batch."""
        return self

    def padded_for(self, rows: int, multiple: int) -> Order:
        """This order for a sequence of `rows`, which is padded if it is no multiple of `multiple`; itself if it was made for
        one sequence.
        """
        return self if self.varies else replace(self, length=rows if rows % multiple else None)

    def whole(self, tensor: Tensor, dim: int) -> Tensor:
        """A joined tensor without its padding."""
        return tensor if self.length is None else tensor.narrow(dim, 0, self.length)


@dataclass(frozen=True)
class Contiguous(Order):
    """Each rank holds a stretch of neighbours."""

    name = "none"

    def positions(self, rows: int, rank: int, device: torch.device | None = None) -> Tensor:
        size = rows // self.ranks
        return torch.arange(rank * size, (rank + 1) * size, device=device)

    def split(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        if self.ranks == 1:
            return tensor
        if tensor.size(dim) % self.ranks:
            raise ValueError(
                f"a sequence of {tensor.size(dim)} rows cannot be cut into {self.ranks} equal parts, one a rank"
            )
        return tensor.chunk(self.ranks, dim)[rank].contiguous()

    def split_into(self, part: Tensor, tensor: Tensor, dim: int, rank: int) -> None:
        part.copy_(tensor.chunk(self.ranks, dim)[rank])

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        return parts[0] if self.ranks == 1 else torch.cat(list(parts), dim)

    def blocks(
        self, rows: int, rank: int, *, is_causal: bool, keys: int | None = None
    ) -> tuple[Block, ...] | None:
        every = slice(0, rows)
        if not is_causal:
            return (
                Block(every, slice(0, self.length or (rows if keys is None else keys) * self.ranks), False),
            )
        own = Block(every, slice(rank * rows, (rank + 1) * rows), True)
        return (Block(every, slice(0, rank * rows), False), own) if rank else (own,)

    def seen(
        self, rank: int, source: int, rows: int, keys: int, *, is_causal: bool
    ) -> tuple[slice, slice] | None:
        if is_causal and source > rank:
            return None
        return slice(0, rows), slice(0, keys if is_causal else self.real(source, keys))


@dataclass(frozen=True)
class Dealt(Order):
    """Any rows: `dealt` [R, W, P/W] are the positions that each rank holds, ascending, for each row of the batch, or
    for all of them where R is 1.
    """

    dealt: Tensor = field(default_factory=lambda: torch.empty(0, 0, 0, dtype=torch.int64))
    kind: str = "dealt"
    _there: dict[tuple[torch.device, bool], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    varies = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.kind

    def of_rows(self, start: int, size: int) -> Order:
        return self if len(self.dealt) == 1 else replace(self, dealt=self.dealt[start : start + size])

    def positions(self, rows: int, rank: int, device: torch.device | None = None) -> Tensor:
        self._check(rows)
        of_rank = (self.dealt if device is None else self._on(device))[:, rank]
        return of_rank[0] if len(of_rank) == 1 else of_rank

    def split(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        self._check(tensor.size(dim))
        return self._taken(tensor, dim, self._on(tensor.device)[:, rank])

    def split_into(self, part: Tensor, tensor: Tensor, dim: int, rank: int) -> None:
        part.copy_(self.split(tensor, dim, rank))

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        joined = torch.cat(list(parts), dim)
        self._check(joined.size(dim))
        return self._taken(joined, dim, self._on(joined.device, back=True))

    def blocks(
        self, rows: int, rank: int, *, is_causal: bool, keys: int | None = None
    ) -> tuple[Block, ...] | None:
        return None if is_causal else super().blocks(rows, rank, is_causal=False, keys=keys)

    def real(self, rank: int, rows: int) -> int:
        if self.length is None:
            return rows
        raise ValueError("rows that are dealt out by a batch differ from row to row of it")

    def _check(self, rows: int) -> None:
        if rows != self.dealt.size(1) * self.dealt.size(2):
            raise ValueError(
                f"a sequence of {rows} rows, and the batch was dealt out as one of {self.dealt[0].numel()}"
            )

    def _on(self, device: torch.device, *, back: bool = False) -> Tensor:
        """`dealt` on a device; with `back` where each position stands in the ranks' rows one behind the other, [R, P]. It is
        copied once for the batch, and not at each split and join.
        """
        if torch.compiler.is_compiling():  # a graph depends on nothing that is kept here
            return self._rows(back).to(device)
        if (device, back) not in self._there:
            with torch.inference_mode(False):  # training may use what an evaluation has copied
                self._there[device, back] = to_device(self._rows(back), device)
        return self._there[device, back]

    def _rows(self, back: bool) -> Tensor:
        return self.dealt.flatten(1).argsort(1) if back else self.dealt

    def _taken(self, tensor: Tensor, dim: int, rows: Tensor) -> Tensor:
        """Rows [R, n] along `dim`; row r of them from row r of dimension 0, the batch."""
        if len(rows) == 1:
            return tensor.index_select(dim, rows[0])
        dim %= tensor.ndim
        if dim == 0 or tensor.size(0) not in (1, len(rows)):
            raise ValueError(
                f"a tensor of shape {list(tensor.shape)} has no dimension 0 of {len(rows)} rows, each of which is dealt "
                "out in another order: give the model positions in the batch, not a table of its own"
            )
        tensor = tensor.expand(len(rows), *tensor.shape[1:])
        shape = [len(rows)] + [1] * (tensor.ndim - 1)
        shape[dim] = rows.size(1)
        size = list(tensor.shape)
        size[dim] = rows.size(1)
        return tensor.gather(dim, rows.view(shape).expand(size))


def padded(tensor: Tensor, dim: int, rows: int, fill: float | bool | None = None) -> Tensor:
    """`tensor` with `rows` along `dim`: what is missing is filled behind it, with `fill`, or 0, or true for booleans."""
    missing = rows - tensor.size(dim)
    if missing == 0:
        return tensor
    if fill is None:
        fill = tensor.dtype == torch.bool
    dim %= tensor.ndim
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, missing], value=fill)


def static_order(balance: str, ranks: int, length: int | None = None) -> Order:
    """The order that `balance` names, head-tail for those that only a batch's values can tell."""
    return Contiguous(ranks, length) if balance == "none" else Order(ranks, length)


_TAG = "_parallelizer_order"


def tagged(tensor: Tensor, order: Order) -> Tensor:
    """The tensor, from now on known to hold rows of a sequence that was dealt out in this order."""
    setattr(tensor, _TAG, order)
    return tensor


def order_of(tensor: Tensor) -> Order | None:
    """The order that a tensor was dealt out in by `shard_batch`; None for any other tensor, also for a copy of one."""
    return getattr(tensor, _TAG, None)
