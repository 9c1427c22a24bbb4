"""What is searched for: the least time on the GPUs, the fewest GPUs, or the least cost of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.propose.search.found import SearchResult
from parallelizer.propose.search.run import Search
from parallelizer.propose.search.space import divisors
from parallelizer.propose.search.task import SearchTask

TIME, MEMORY, COST = AIMS = ("time", "memory", "cost")

PRICE = "price_per_hour"
"""The key of a hardware file: what one device costs in an hour."""

FEW = 3
"""Candidates that are dry-run for each number of GPUs, where several numbers are tried."""


@dataclass(frozen=True)
class Tried:
    """A search on one kind of hardware and one number of GPUs."""

    search: Search
    task: SearchTask
    found: SearchResult

    @property
    def cost(self) -> float:
        """Of a step of the best candidate, in the currency of the hardware file."""
        price = float(self.task.base.hardware.get(PRICE) or 0.0)
        return self.found.results[0].seconds / 3600 * self.task.gpus * price


def pursue(aim: str, tasks: Sequence[SearchTask], tell: Callable[[str], None]) -> list[Tried]:
    """The searches that were made, the best first; those without results last. `tasks` are one for each kind of hardware; only
    costs compare several. Raises PlanError.
    """
    if aim == COST:
        for task in tasks:
            _needs_price(task)
    every: list[Tried] = []
    for task in tasks:
        search = Search(task.base, tell)
        for smaller in _numbers(aim, task):
            found = search.run(smaller)
            every.append(Tried(search, smaller, found))
            if not found.complete or (aim == MEMORY and found.results):
                break
        if not every[-1].found.complete:
            break
    return sorted(every, key=lambda one: _rank(aim, one))


def _numbers(aim: str, task: SearchTask) -> Iterator[SearchTask]:
    """The task with each number of GPUs that is tried, of which the last has all."""
    if aim == TIME:
        yield task
        return
    for gpus in divisors(task.gpus):
        yield dataclasses.replace(task, gpus=gpus, traced=FEW)


def _rank(aim: str, one: Tried) -> tuple[bool, float, int]:
    if not one.found.results:
        return True, 0.0, -one.task.gpus  # the one that comes nearest says by how much nothing fits
    return False, one.cost if aim == COST else 0.0, one.task.gpus


def _needs_price(task: SearchTask) -> None:
    if not task.base.hardware.get(PRICE):
        message = f"the price of {task.machine.name} is not known"
        advice = (
            f"add `{PRICE}: <what a device costs in an hour>` to its hardware file, or ++hardware.{PRICE}=2.5"
        )
        raise PlanError([Diagnostic("search-price", message, None, advice)])
