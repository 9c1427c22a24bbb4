"""Placements as text: `replicate`, `shard(1)`, `partial`, a layout's name, and `a -> b`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from parallelizer.diagnostics import Span
from parallelizer.plan import PARTIAL, REPLICATE, Flow, Placement, shard

if TYPE_CHECKING:
    from torch.distributed.tensor import placement_types

_SHARD = re.compile(r"shard\(\s*(-?\d{1,2})\s*\)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class PlacementError(ValueError):
    """A text that is no placement; `start` and `end` bound the wrong part of it."""

    def __init__(self, message: str, start: int, end: int) -> None:
        super().__init__(message)
        self.start, self.end = start, end


def parse_placement(text: str, span: Span | None = None, offset: int = 0) -> Placement:
    """One placement. `span` is that of the whole text, `offset` where this part begins in it.

    Raises PlacementError with the columns of the wrong part.
    """
    body = text.strip()
    start = offset + len(text) - len(text.lstrip())
    here = _part(span, start, len(body))
    if body == "replicate":
        return Placement("replicate", span=here)
    if body == "partial":
        return Placement("partial", span=here)
    if match := _SHARD.fullmatch(body):
        return Placement("shard", int(match[1]), span=here)
    if body.startswith("shard"):
        raise PlacementError(f"{body!r} is no placement", start, start + len(body))
    if _NAME.fullmatch(body):
        return Placement("layout", name=body, span=here)
    raise PlacementError(f"{body!r} is no placement" if body else "a placement is missing", start, start + max(len(body), 1))


def parse_flow(text: str, *, output: bool, span: Span | None = None) -> Flow:
    """`a -> b`, or one placement: how an input arrives, how an output leaves. Raises PlacementError."""
    parts = text.split("->")
    if len(parts) > 2:
        start = len(parts[0]) + 2 + len(parts[1])
        raise PlacementError("a second `->`", start, start + 2)
    if len(parts) == 1:
        placement = parse_placement(text, span)
        return Flow(wanted=placement) if output else Flow(arrives=placement)
    return Flow(parse_placement(parts[0], span), parse_placement(parts[1], span, len(parts[0]) + 2))


def _part(span: Span | None, start: int, length: int) -> Span | None:
    if span is None:
        return None
    # A quoted scalar's span includes its opening quote; its text does not.
    quote = 1 if span.end_column - span.column >= length + 2 and start == 0 else 0
    return Span(span.file, span.line, span.column + start + quote, span.column + start + quote + length)


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
