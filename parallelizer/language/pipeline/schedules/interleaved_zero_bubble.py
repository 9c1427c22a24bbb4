"""Interleaved zero bubble, ZB-H1 (Qi et al. 2023, arXiv:2401.10241) on several stages a rank: the backward for weights
is separate, and a rank runs it where interleaved 1F1B waits.
"""

from __future__ import annotations

from parallelizer.language.pipeline.actions import BACKWARD_INPUT, FORWARD, Order
from parallelizer.language.pipeline.interleaving import round_size, unequal_rounds, visits
from parallelizer.language.pipeline.schedule import Misfit, RankActions, Schedule


def order(ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """A rank delays its backwards for weights by as many microbatches as there are ranks before it, so that the gradients
    of inputs travel without a wait.
    """
    orders = []
    for rank in range(ranks):
        own = RankActions()
        forwards = visits(rank, ranks, stages_per_rank, microbatches, backward=False)
        ahead = (stages_per_rank - 1) * round_size(ranks, microbatches) + ranks - 1 - rank
        for _ in range(min(ahead, stages_per_rank * microbatches)):
            own.add(FORWARD, next(forwards))
        backwards = visits(rank, ranks, stages_per_rank, microbatches, backward=True)
        for number, stage in enumerate(backwards):
            if (ready := next(forwards, None)) is not None:
                own.add(FORWARD, ready)
            own.add(BACKWARD_INPUT, stage)
            if number >= rank:
                own.add_owed_weight()
        while own.add_owed_weight():
            pass
        orders.append(tuple(own.actions))
    return tuple(orders)


def misfit(ranks: int, stages_per_rank: int, microbatches: int) -> Misfit | None:
    """Any number of stages, and microbatches that form equal rounds."""
    return unequal_rounds("interleaved-zero-bubble", ranks, microbatches)


SCHEDULE = Schedule(
    "interleaved-zero-bubble",
    "interleaved, with backwards for weights where others wait",
    "loop",
    2,
    order,
    misfit,
)
