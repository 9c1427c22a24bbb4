"""What would make something fit where nothing does: the cheapest changes, by estimate."""

from __future__ import annotations

import dataclasses

from parallelizer.diagnostics.units import size
from parallelizer.propose.search.candidate import FULL, NO_CHECKPOINT, SELECTIVE, Candidate
from parallelizer.propose.search.estimate import Estimates
from parallelizer.propose.search.run import Search
from parallelizer.propose.search.space import CandidateCount, candidates
from parallelizer.propose.search.task import SearchTask
from parallelizer.propose.search.within import Within

TIMES = (2, 4, 8, 16)
"""So many times as many GPUs are tried, after one more node."""

PARTS = (2, 4, 8)
"""Parts of a sequence that are tried."""


def remedies(search: Search, task: SearchTask) -> list[str]:
    """One change of each kind, the one that costs least first: recomputation, more GPUs, a shorter sequence."""
    found = [_checkpointing(search, task), _more_gpus(search, task), _shorter(search, task)]
    return [one for one in found if one is not None]


def _checkpointing(search: Search, task: SearchTask) -> str | None:
    """Where the command line allows less than all checkpoints."""
    if not task.within.sets("checkpoint"):
        return None
    limits = {key: limit for key, limit in task.within.limits.items() if not key.startswith("checkpoint")}
    freed = dataclasses.replace(task, within=Within(limits))
    best = _smallest(search, freed)
    if best is None or best[0] > task.memory:
        return None
    return f"let --within checkpoint have {best[1].checkpoint}: then about {size(best[0])}"


def _more_gpus(search: Search, task: SearchTask) -> str | None:
    node = task.machine.per_node
    more = [task.gpus + node] if task.gpus % node == 0 else []
    for gpus in [*more, *(task.gpus * n for n in TIMES)]:
        best = _smallest(search, dataclasses.replace(task, gpus=gpus))
        if best is not None and best[0] <= task.memory:
            return f"take {gpus:,} GPUs: {best[1].words()} then needs about {size(best[0])}"
    return None


def _shorter(search: Search, task: SearchTask) -> str | None:
    length = task.base.workload.seq_len
    for part in PARTS:
        best = _smallest(search, task, 1 / part)
        if best is not None and best[0] <= task.memory and length % part == 0:
            return f"take train.seq_len={length // part}: then about {size(best[0])}"
    return None


def _smallest(search: Search, task: SearchTask, part: float = 1.0) -> tuple[int, Candidate] | None:
    """The least peak by estimate, with this part of the activations, of the classes that the search has traced; where it has
    traced none of them, of the one with most ranks for tp and the experts.
    """
    least, traces = _holding_least(search, task), search.classes.traces
    if least and not any(c.trace_class in traces for c in least):
        search.classes.trace([max(least, key=lambda c: (c.tp, c.ep)).trace_class])
    estimates = Estimates(task.machine, traces)
    return min(((estimates.peak(c, part), c) for c in least if c.trace_class in traces), default=None)


def _holding_least(search: Search, task: SearchTask) -> list[Candidate]:
    """Of each class the candidate that holds least, with the most recomputation that the limits allow. Stages and split sequences
    are left out: their classes are many.
    """
    every = [
        c
        for c in candidates(search.facts(task), task.within, CandidateCount())
        if c.pp == c.cp == 1 and c.reshard_after_forward and c.share == 1
    ]
    mode = next((m for m in (FULL, SELECTIVE, NO_CHECKPOINT) if any(c.checkpoint == m for c in every)), None)
    by_class: dict[Candidate, Candidate] = {}
    for one in every:
        held = by_class.get(one.trace_class)
        if one.checkpoint == mode and (
            held is None or (one.rows, one.dp_replicate) < (held.rows, held.dp_replicate)
        ):
            by_class[one.trace_class] = one
    return list(by_class.values())
