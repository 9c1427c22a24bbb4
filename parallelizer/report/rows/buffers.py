"""The rows of the tables of buffers: the tensors whose sequence is split over cp, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.styles.application import Program
from parallelizer.styles.context_parallel.order import Order, static_order


@dataclass(frozen=True)
class BufferRow:
    """A tensor of the `batch` or the `model`, and how it is split."""

    name: str
    owner: str
    split: str
    span: Span | None


def buffer_rows(program: Program) -> list[BufferRow]:
    """The batch's, then the model's; none where cp is 1."""
    if program.mesh.sizes["cp"] == 1:
        return []
    return [
        BufferRow(b.name, owner, f"made: {b.make}" if b.make else f"dimension {b.dim}", b.span)
        for owner, buffers in (("batch", program.plan.batch), ("model", program.plan.buffers))
        for b in buffers.values()
    ]


def dealt_out(program: Program) -> str:
    """Which rows each rank gets, and the busiest rank's attention over the mean."""
    plan, cp = program.plan, program.mesh.sizes["cp"]
    balance = plan.balance
    if balance == "auto" and any(b.documents for b in plan.batch.values()):
        balance = "by-cost" if plan.buffers else "per-document"
    if balance in ("per-document", "by-cost"):
        how = "each document's head and tail paired" if balance == "per-document" else "by cost"
        return f"{how}: the busiest rank's attention over the mean depends on the batch"
    how = "neighbouring rows" if balance == "none" else "head and tail chunks paired"
    most = imbalance(static_order(balance, cp), 2 * cp * 512)
    return f"{how}: under a causal mask the busiest rank has {most:.2f} of the mean work"


def imbalance(order: Order, rows: int) -> float:
    """The pairs of a query and a key that the busiest rank has under a causal mask over `rows` rows, padding included, over
    the mean of all ranks.
    """
    shares = []
    for rank in range(order.ranks):
        blocks = order.blocks(rows // order.ranks, rank, is_causal=True)
        if blocks is None:
            raise ValueError(f"what {order.name} order costs is known of a batch only")
        areas = [(b.queries.stop - b.queries.start, b.keys.stop - b.keys.start, b.is_causal) for b in blocks]
        shares.append(sum(q * (q + 1) // 2 if causal else q * k for q, k, causal in areas))
    return max(shares) * order.ranks / sum(shares)
