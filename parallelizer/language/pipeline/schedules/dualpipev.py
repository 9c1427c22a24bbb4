"""DualPipeV (DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe; the V-shaped half of DualPipe, arXiv:2412.19437): in the
steady state every forward has a backward of another microbatch next to it.

An engine can overlap the two, so that the communication of one runs beside the computation of the other. Here they are
two actions, the forward first.
"""

from __future__ import annotations

from parallelizer.language.pipeline.actions import BACKWARD, BACKWARD_INPUT, FORWARD, Action, Order
from parallelizer.language.pipeline.schedule import Misfit, RankActions, Schedule, exactly


def order(ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    """The eight steps of DualPipeV, on every rank."""
    return tuple(tuple(_rank_order(rank, ranks, microbatches)) for rank in range(ranks))


def _rank_order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """`down` is the rank's stage on the way from rank 0 to the last rank, `up` the one on the way back."""
    own, down, up = RankActions(), rank, 2 * ranks - 1 - rank
    after = ranks - 1 - rank
    for _ in range(2 * after):
        own.add(FORWARD, down)
    for _ in range(rank + 1):
        own.add(FORWARD, down)
        own.add(FORWARD, up)
    for _ in range(after):
        own.add(BACKWARD_INPUT, up)
        own.add_owed_weight()
        own.add(FORWARD, up)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        own.add(FORWARD, down)
        own.add(BACKWARD, up)
        own.add(FORWARD, up)
        own.add(BACKWARD, down)
    for _ in range(after):
        own.add(BACKWARD, up)
        own.add(FORWARD, up)
        own.add(BACKWARD, down)
    # Drain: the first half of these backwards is whole. In the second half the backwards for weights wait.
    whole = rank + 1
    for number in range(2 * (rank + 1)):
        own.add(BACKWARD if number < whole else BACKWARD_INPUT, down if number % 2 else up)
    for _ in range(after):
        own.add_owed_weight()
        own.add(BACKWARD_INPUT, down)
    while own.add_owed_weight():
        pass
    return own.actions


def misfit(ranks: int, stages_per_rank: int, microbatches: int) -> Misfit | None:
    """Exactly two stages a rank, and at least as many microbatches as stages."""
    wrong = exactly(2, "dualpipev", stages_per_rank)
    if wrong is None and microbatches < 2 * ranks:
        message = f"dualpipev on {ranks} ranks takes {2 * ranks} microbatches or more, not {microbatches}"
        wrong = Misfit("microbatches", message, f"set microbatches to {2 * ranks} or more, or choose zbv")
    return wrong


SCHEDULE = Schedule(
    "dualpipev", "zbv's V with every forward next to a backward of another microbatch", "v", 2, order, misfit
)
