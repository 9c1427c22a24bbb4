"""What a collective sends."""

from __future__ import annotations


def wire_bytes(kind: str, payload: int, ranks: int) -> int:
    """What one rank of W sends, by the algorithms that move the least: (W-1)/W of the payload, an all-reduce
    twice that.
    """
    if kind in ("send", "recv", "broadcast"):
        return payload
    share = payload * (ranks - 1) // ranks
    return 2 * share if kind == "all_reduce" else share
