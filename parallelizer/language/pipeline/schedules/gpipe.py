"""GPipe (Huang et al. 2019, arXiv:1811.06965): all forwards, then all backwards."""

from __future__ import annotations

from parallelizer.language.pipeline.actions import BACKWARD, FORWARD, Action, Order
from parallelizer.language.pipeline.schedule import Misfit, Schedule, exactly


def order(ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """Every rank runs the microbatches in the same order in both directions."""
    return tuple(
        tuple(
            Action(kind, rank, microbatch)
            for kind in (FORWARD, BACKWARD)
            for microbatch in range(microbatches)
        )
        for rank in range(ranks)
    )


def misfit(ranks: int, stages_per_rank: int, microbatches: int) -> Misfit | None:
    """Any number of microbatches."""
    return exactly(1, "gpipe", stages_per_rank)


SCHEDULE = Schedule(
    "gpipe", "all forwards, then all backwards; holds every microbatch", "loop", 1, order, misfit
)
