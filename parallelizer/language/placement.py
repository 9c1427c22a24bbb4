"""Placements as text: `replicate`, `shard(1)`, `partial`, a layout's name, and `a -> b`; and as torch's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Span, quoted
from parallelizer.language.plan import PARTIAL, REPLICATE, Flow, Placement, shard

if TYPE_CHECKING:
    from torch.distributed.tensor import placement_types

RESERVED = ("replicate", "partial", "shard")
"""Words that no layout can be called."""

_SHARD = re.compile(r"shard\(\s*(-?[0-9]{1,2})\s*\)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

Place = Callable[[int, int], Span]
"""Where a part of a text stands, by its first character and one past its last."""


class PlacementError(ValueError):
    """A text that is no placement; `start` and `end` bound the wrong part of it."""

    def __init__(self, message: str, start: int, end: int) -> None:
        super().__init__(message, start, end)
        self.message, self.start, self.end = message, start, end

    def __str__(self) -> str:
        return self.message


def is_layout_name(text: str) -> bool:
    """Whether a layout can be called so, and be told from a placement."""
    return _NAME.fullmatch(text) is not None and text not in RESERVED


def parse_placement(text: str, place: Place | None = None, offset: int = 0) -> Placement:
    """One placement; a word that is none of the language's is taken for a layout's name.

    `place` gives the placement its span; `offset` is where `text` begins in the text that `place` knows.
    Raises PlacementError with the columns of the wrong part.
    """
    body = text.strip()
    start = offset + len(text) - len(text.lstrip())
    end = start + len(body)
    span = place(start, end) if place else None
    if body in ("replicate", "partial"):
        return Placement(body, span=span)
    if match := _SHARD.fullmatch(body):
        return Placement("shard", int(match[1]), span=span)
    if is_layout_name(body):
        return Placement("layout", name=body, span=span)
    message = f"{quoted(body)} is not a placement" if body else "a placement is missing"
    raise PlacementError(message, start if body else offset, end if body else offset + max(len(text), 1))


def parse_flow(text: str, *, output: bool, place: Place | None = None) -> Flow:
    """`a -> b`, or one placement: how an input arrives, how an output leaves. Raises PlacementError."""
    parts = text.split("->")
    if len(parts) > 2:
        start = len(parts[0]) + 2 + len(parts[1])
        raise PlacementError("a second `->`", start, start + 2)
    if len(parts) == 1:
        placement = parse_placement(text, place)
        return Flow(wanted=placement) if output else Flow(arrives=placement)
    return Flow(parse_placement(parts[0], place), parse_placement(parts[1], place, len(parts[0]) + 2))


def to_torch(placement: Placement) -> placement_types.Placement:
    """The torch placement of a resolved one. Raises ValueError for a layout's name."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if placement.kind == "shard" and placement.dim is not None:
        return Shard(placement.dim)
    if placement.kind == "replicate":
        return Replicate()
    if placement.kind == "partial":
        return Partial()
    raise ValueError(f"the layout {placement} was not resolved")


def from_torch(placement: placement_types.Placement) -> Placement:
    """The placement as we write it; a strided shard (FSDP inside a tensor-sharded dimension) is a shard."""
    if placement.is_replicate():
        return REPLICATE
    if placement.is_partial():
        return PARTIAL
    dim: int = placement.dim  # type: ignore[attr-defined]
    return shard(dim)
