"""`fused-features`: a projection that makes several things at once is split as if it made one, or the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.follow.flow import Arrival, FollowedStep


def fused_features(followed: Followed) -> Iterator[Diagnostic]:
    """Output features that are taken apart, of which a rank has a run of neighbours or slices of other parts; and features
    that were split part by part (`packed`) and are used in one piece.
    """
    for same in grouped(
        followed.flow.taken_apart, lambda t: (followed.rule_of(t.projection), t.sizes, t.packed)
    ):
        first, where = same[0], followed.folded(t.projection for t in same)
        parts = ", ".join(map(str, first.sizes)) or "<the sizes of its parts>"
        cut = f"{followed.folded(t.module for t in same)} cuts the output of {where} into parts"
        if first.packed:
            cut += f" of {_proportion(first.sizes)}, but `packed` splits parts of {_proportion(first.packed)}"
        else:
            cut += ", but each rank has neighbouring features instead of a slice of each part"
        yield Diagnostic(
            "fused-features",
            cut,
            followed.span(first.projection, None, ("packed" if first.packed else "output",)),
            f"write `packed: [{parts}]`, which splits each part separately",
        )
    for unpacked in grouped(_used_in_one_piece(followed.flow), lambda a: followed.rule_of(a.packed)):
        where = followed.folded(a.packed for a in unpacked)
        yield Diagnostic(
            "fused-features",
            f"`packed` gives each rank a slice of each part of the output of {where}, but no code separates the parts "
            f"before {followed.folded(a.module for a in unpacked)}, whose rows are in another order",
            followed.span(unpacked[0].packed, None, ("packed",)),
            "remove `packed`: it is for projections that compute several tensors at once, such as `q|k|v`",
        )


def _proportion(sizes: Sequence[int]) -> str:
    return ":".join(map(str, sizes))


def _used_in_one_piece(flow: FollowedStep) -> list[Arrival]:
    """Packed features as they arrive, split along the dimension that a rule for plain features says: the first of each
    projection.
    """
    found: dict[str, Arrival] = {}
    for a in flow.arrivals:
        split = a.since is not None and a.expected.dim is not None and a.dim == a.expected.dim % a.ndim
        if a.packed and split and not a.takes_packed:
            found.setdefault(a.packed, a)
    return list(found.values())
