"""Candidates beside the best, in the keys that are not tried everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parallelizer.propose.search.candidate import FULL, WHOLE, Candidate
from parallelizer.propose.search.space import SpaceFacts
from parallelizer.propose.search.within import METHODS, QUARTERS, SHARE, Within


def refined(best: Sequence[Candidate], facts: SpaceFacts, within: Within) -> Iterator[Candidate]:
    """What is tried beside `best`, the fastest first. A key with a limit is as the limit says already. Whole streams and other
    methods have classes of their own, which take seconds to trace: only the fastest with such an axis is varied.
    """
    if not within.sets(SHARE):
        for one in best:
            if one.checkpoint == FULL:
                yield from (replace(one, share=s) for s in QUARTERS if s < 1 and round(s * facts.layers))
    if not within.sets("stream") and facts.stream:
        yield from (replace(one, stream=WHOLE) for one in _first(best, "tp"))
    if not within.sets("cp.method"):
        yield from (
            replace(one, method=method)
            for one in _first(best, "cp")
            for method in METHODS
            if method != facts.method and not (method == "ulysses-ring" and _is_prime(one.cp))
        )


def _is_prime(cp: int) -> bool:
    """Whether `ulysses-ring` over `cp` ranks is `ring` or `ulysses`: its degree divides them."""
    return all(cp % n for n in range(2, cp))


def _first(best: Sequence[Candidate], axis: str) -> list[Candidate]:
    """The fastest with an axis, if there is one."""
    return [one for one in best if one.mesh.sizes[axis] > 1][:1]
