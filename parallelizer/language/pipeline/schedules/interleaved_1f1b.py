"""Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473): several stages a rank, so that a rank waits for shorter
stages when the pipeline fills and drains.
"""

from __future__ import annotations

from parallelizer.language.pipeline.actions import BACKWARD, FORWARD, Order
from parallelizer.language.pipeline.interleaving import round_size, unequal_rounds, visits
from parallelizer.language.pipeline.schedule import Misfit, RankActions, Schedule


def order(ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """A rank starts with the forwards of all its stages but the last, and two more for each rank after it."""
    orders = []
    for rank in range(ranks):
        own = RankActions()
        forwards = visits(rank, ranks, stages_per_rank, microbatches, backward=False)
        backwards = visits(rank, ranks, stages_per_rank, microbatches, backward=True)
        ahead = (stages_per_rank - 1) * round_size(ranks, microbatches) + 2 * (ranks - 1 - rank)
        for number, stage in enumerate(forwards):
            own.add(FORWARD, stage)
            if number >= ahead:
                own.add(BACKWARD, next(backwards))
        for stage in backwards:
            own.add(BACKWARD, stage)
        orders.append(tuple(own.actions))
    return tuple(orders)


def misfit(ranks: int, stages_per_rank: int, microbatches: int) -> Misfit | None:
    """Two stages a rank or more, and microbatches that form equal rounds."""
    if stages_per_rank < 2:
        message = f"interleaved-1f1b takes 2 stages a rank or more, not {stages_per_rank}"
        return Misfit("stages_per_rank", message, "set stages_per_rank to 2 or more, or choose 1f1b")
    return unequal_rounds("interleaved-1f1b", ranks, microbatches)


SCHEDULE = Schedule(
    "interleaved-1f1b",
    "1f1b with several stages a rank; smaller bubble, more messages",
    "loop",
    2,
    order,
    misfit,
)
