"""The whole space of a search with its bounds off: every candidate priced from its traced class."""

from __future__ import annotations

from dataclasses import replace

from parallelizer.propose.search.candidate import NO_CHECKPOINT
from parallelizer.propose.search.estimate import Estimate, Estimates
from parallelizer.propose.search.run import Search
from parallelizer.propose.search.space import CandidateCount, candidates
from parallelizer.propose.search.task import SearchTask


def every_price(search: Search, task: SearchTask) -> list[Estimate]:
    """The estimates of all candidates whose class can be traced, the fastest first. Classes that are known stay."""
    every = list(candidates(search.facts(task), task.within, CandidateCount()))
    keys = {one.trace_class for one in every}
    keys |= {replace(one.trace_class, checkpoint=NO_CHECKPOINT) for one in every if one.share < 1}
    search.classes.trace(keys)
    estimates = Estimates(task.machine, search.classes.traces)
    priced = [
        estimates.of(one, task.memory) for one in every if one.trace_class not in search.classes.refused
    ]
    return sorted(priced, key=lambda e: (e.seconds, e.candidate))
