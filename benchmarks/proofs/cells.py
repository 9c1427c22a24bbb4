"""The cells of a matrix of proofs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What is proven in one row: a model under a plan (its own, where none is named), and what else is set for it."""

    model: str
    plan: str
    note: str = ""
    overrides: tuple[str, ...] = ()
    accumulate: int = 1
    seq_len: int | None = None

    @property
    def name(self) -> str:
        return ", ".join(part for part in (self.model, self.plan, self.note) if part)


@dataclass(frozen=True)
class Cell:
    """The outcome of one proof: the worst error as a share of its bound, or why there is none. `ran` is what
    the mesh became.
    """

    row: Row
    preset: str
    passed: bool
    share: float | None
    ran: str
    reason: str = ""
