"""1F1B (Narayanan et al. 2019, PipeDream; without its weight versions in arXiv:2006.09503): as soon as a rank can, it runs
a backward after each forward. It has GPipe's bubble, but holds at most as many microbatches as there are stages from
the rank to the last.
"""

from __future__ import annotations

from parallelizer.language.pipeline.actions import BACKWARD, FORWARD, Order
from parallelizer.language.pipeline.schedule import Misfit, RankActions, Schedule, exactly


def order(ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """A rank starts with one forward for each rank after it, which is how long the first backward takes to arrive."""
    orders = []
    for rank in range(ranks):
        own = RankActions()
        ahead = min(ranks - 1 - rank, microbatches)
        for _ in range(ahead):
            own.add(FORWARD, rank)
        for _ in range(microbatches - ahead):
            own.add(FORWARD, rank)
            own.add(BACKWARD, rank)
        for _ in range(ahead):
            own.add(BACKWARD, rank)
        orders.append(tuple(own.actions))
    return tuple(orders)


def misfit(ranks: int, stages_per_rank: int, microbatches: int) -> Misfit | None:
    """Any number of microbatches."""
    return exactly(1, "1f1b", stages_per_rank)


SCHEDULE = Schedule(
    "1f1b", "a backward after each forward; GPipe's bubble, less memory", "loop", 1, order, misfit
)
