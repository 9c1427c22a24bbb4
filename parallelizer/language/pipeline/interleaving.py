"""What the interleaved schedules share: the round in which a rank visits its stages (Narayanan et al. 2021,
arXiv:2104.04473, section 2.2), for any number of microbatches that forms equal rounds, as PyTorch allows.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.language.pipeline.schedule import Misfit


def round_size(ranks: int, microbatches: int) -> int:
    """The number of microbatches that a rank runs on one of its stages before it goes on to its next stage."""
    return microbatches // _rounds(ranks, microbatches)


def visits(
    rank: int, ranks: int, stages_per_rank: int, microbatches: int, *, backward: bool
) -> Iterator[int]:
    """The stages of a rank in the order in which it runs them, once for each microbatch."""
    own = [rank + ranks * chunk for chunk in range(stages_per_rank)]
    size = round_size(ranks, microbatches)
    for _ in range(_rounds(ranks, microbatches)):
        for stage in reversed(own) if backward else own:
            yield from [stage] * size


def unequal_rounds(schedule: str, ranks: int, microbatches: int) -> Misfit | None:
    """Why microbatches do not form rounds of equal size, with the nearest numbers that do."""
    if not _rest(ranks, microbatches):
        return None
    below = next(n for n in range(microbatches, 0, -1) if not _rest(ranks, n))
    above = next(n for n in range(microbatches, 2 * microbatches + ranks) if not _rest(ranks, n))
    message = (
        f"{schedule} on {ranks} ranks cannot divide {microbatches} microbatches into "
        f"{_rounds(ranks, microbatches)} equal rounds"
    )
    help_text = f"set microbatches to {below} or {above}; any multiple of {ranks} fits"
    return Misfit("microbatches", message, help_text)


def _rounds(ranks: int, microbatches: int) -> int:
    """As many rounds as keep every rank busy, which takes one microbatch a rank."""
    return max(1, microbatches // ranks)


def _rest(ranks: int, microbatches: int) -> int:
    return microbatches % _rounds(ranks, microbatches)
