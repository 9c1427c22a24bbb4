"""`layout-mismatch`: what arrives at a module lies otherwise than its rule says."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.follow.flow import Arrival


def layout_mismatch(followed: Followed) -> Iterator[Diagnostic]:
    """An input that varies over an axis though its rule takes it for whole, or the other way round, or that is cut along
    another dimension.
    """

    def alike(a: Arrival) -> Hashable:
        return followed.rule_of(a.module, a.axis), a.name, a.axis, a.expected, a.since is None, _other_dim(a)

    otherwise = (a for a in followed.flow.arrivals if _varies_otherwise(a) or _other_dim(a) is not None)
    for same in grouped(otherwise, alike):
        first, where = same[0], followed.folded(a.module for a in same)
        name = f"the input {first.name} of" if first.name else "the input of"
        if first.since is None:
            related: tuple[Related, ...] = ()
            lies = f"is whole on every rank of {first.axis}"
            help_text = (
                f"write `replicate` for the input, or let the module before it return {first.expected}"
            )
        else:
            lies, related = (
                f"differs between the ranks of {first.axis}",
                followed.since(first.since, first.axis),
            )
            help_text = (
                "write the placement that it has (`shard(1) -> replicate` gathers it), or gather it in the "
                "rule of the module before"
            )
            dim = _other_dim(first)
            if dim is not None:
                lies = f"is split along dimension {dim} over {first.axis}"
                help_text = (
                    f"write the placement that it has: `shard({dim})`, or `shard({dim}) -> {first.expected}`"
                )
        yield Diagnostic(
            "layout-mismatch",
            f"{name} {where} {lies}, but its rule says {first.expected}",
            followed.span(first.module, first.axis, ("input", "layout")),
            help_text,
            related=related,
        )


def _varies_otherwise(a: Arrival) -> bool:
    """Whether it varies where its rule takes it for whole, or is whole where its rule takes it for a part or a term."""
    return (a.expected.kind == "replicate") == (a.since is not None)


def _other_dim(a: Arrival) -> int | None:
    """The dimension that it is cut along, if its rule takes it for cut along another."""
    if a.since is None or a.dim is None or a.expected.dim is None:
        return None
    return a.dim if a.dim != a.expected.dim % a.ndim else None
