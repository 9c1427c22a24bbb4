"""ZB-V (Qi et al. 2023, arXiv:2401.10241, section 6): two stages a rank that form a V, and separate backwards for weights.
It has no bubble where forward, backward for inputs and backward for weights take the same time, and 1F1B's memory.
"""

from __future__ import annotations

from parallelizer.language.pipeline.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    ActionKind,
    Order,
)
from parallelizer.language.pipeline.schedule import Misfit, RankActions, Schedule, exactly


def order(ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """The pattern is that of at least 2 x ranks - 1 microbatches; with fewer, the actions of the others are left out."""
    return tuple(
        tuple(a for a in _rank_order(rank, ranks, microbatches) if a.microbatch < microbatches)
        for rank in range(ranks)
    )


def _rank_order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """`down` is the rank's stage on the way from rank 0 to the last rank, `up` the one on the way back."""
    own, down, up = RankActions(), rank, 2 * ranks - 1 - rank
    pattern = max(2 * ranks - 1, microbatches)

    def run(kinds: str, stage: int) -> None:
        for kind in kinds:
            own.add(ActionKind(kind), stage)

    # Fill: until the first microbatch comes back on the way up.
    run("F" * (2 * (ranks - rank) - 1), down)
    for _ in range(rank):
        run("F", up)
        run("F", down)
    for _ in range(ranks - rank):
        run("FIW", up)
    # Steady: one forward and one backward of each stage.
    while own.count(FORWARD, up) < own.count(FORWARD, down) or own.count(FORWARD, down) < pattern:
        if own.count(FORWARD, down) < pattern:
            run("F", down)
        run("IW", down)
        run("FIW", up)
    # Drain: gradients of inputs first, because the ranks before wait for them.
    for _ in range(rank):
        run("I", down)
        run("I", up)
    for _ in range(ranks - rank):
        run("IW", down)
    for stage in (up, down):
        run("W" * (own.count(BACKWARD_INPUT, stage) - own.count(BACKWARD_WEIGHT, stage)), stage)
    return own.actions


def misfit(ranks: int, stages_per_rank: int, microbatches: int) -> Misfit | None:
    """Exactly two stages a rank, and any number of microbatches."""
    return exactly(2, "zbv", stages_per_rank)


SCHEDULE = Schedule(
    "zbv", "two stages a rank in a V; no bubble if F, I and W take equal time", "v", 2, order, misfit
)
