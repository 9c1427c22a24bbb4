"""The reasons behind the results of a search, in words: what the best is made of, and what others lose by."""

from __future__ import annotations

from collections.abc import Mapping

from parallelizer.diagnostics.units import size
from parallelizer.propose.search.found import SearchResult
from parallelizer.propose.search.task import SearchTask
from parallelizer.propose.search.truth import TracedWhole
from parallelizer.report.rows.time import duration, range_of, shares_of_difference, wait_shares

WAITS = {
    "tp": "the links of tp",
    "cp": "the links of cp",
    "ep": "the all-to-alls of the experts",
    "pp": "the links between stages",
    "bubble": "the bubble of the pipeline",
    "dp_shard": "the gathers and reductions of parameters",
    "dp_replicate": "the sums over replicas",
    "host": "the host",
}
"""What a step waits for, by the names of `StepTime.waits`."""

WORTH_IT = 0.05
"""A wait below this share of the step binds nothing."""


def counts(found: SearchResult) -> str:
    """How many candidates there were, and what became of them."""
    out = sum(found.excluded.values())
    pruned = sum(found.pruned.values())
    traced = len(found.results) + len(found.too_large) + len(found.failed)
    classes = "1 traced class" if found.classes == 1 else f"{found.classes} traced classes"
    every = "1 candidate" if found.total == 1 else f"{found.total:,} candidates"
    return (
        f"{every}: {out:,} ruled out, {pruned:,} pruned by bounds and estimates, {len(found.priced):,} priced from {classes}, "
        f"{traced} dry-run whole"
    )


def headline(one: TracedWhole, task: SearchTask) -> str:
    """The time of a step, and the memory."""
    mfu = "" if one.time.mfu is None else f"{one.time.mfu:.0%} MFU, "
    return (
        f"{duration(one.seconds)} a step ({range_of(one.time)}), {mfu}{one.time.tokens_per_second:,.0f} tokens/s a device, "
        f"peak {size(one.peak)} of {size(task.memory)}"
    )


def held(at_peak: Mapping[str, int]) -> str:
    """What memory is made of at the peak, the largest first."""
    parts = sorted(((count, kind) for kind, count in at_peak.items() if count), reverse=True)
    return ", ".join(f"{kind} {size(count)}" for count, kind in parts)


def loses(best: TracedWhole, other: TracedWhole) -> str:
    """How much slower another is, and by what."""
    slower = other.seconds / best.seconds - 1
    if slower < 0.0005:
        return "as fast"
    # What the faster has less of, the other has more of.
    more = [cause for cause, share in shares_of_difference(other.time, best.time) if share > 0]
    return f"+{slower:.1%}" + (f", more {more[0]}" if more else "")


def too_large(one: TracedWhole, task: SearchTask) -> str:
    """By how much a candidate does not fit."""
    return (
        f"{one.candidate.words()} ({one.candidate.options()}) takes {duration(one.seconds)} but needs {size(one.peak)}: "
        f"{size(one.peak - task.memory)} too much"
    )


def binds(found: SearchResult, task: SearchTask) -> list[str]:
    """What keeps the best candidate from being faster."""
    best, said = found.results[0], []
    faster = [one for one in found.too_large if one.seconds < best.seconds]
    if faster:
        said.append(f"memory: {too_large(min(faster, key=lambda one: one.seconds), task)}")
    for wait in wait_shares(best.time):
        if wait.share >= WORTH_IT:
            name = wait.name.partition("+")[0]
            said.append(f"{WAITS.get(name, wait.name)}: waiting takes {wait.share:.0%} of the step")
    candidate = best.candidate
    if candidate.rows * candidate.accumulate * candidate.microbatches == 1:
        said.append("the batch: every data rank has one sequence")
    return said or ["computation: nothing else takes more than 5% of the step"]


def left_out(found: SearchResult) -> list[str]:
    """What was ruled out and pruned, with the number of candidates, the most first."""
    every = [*found.excluded.items(), *found.pruned.items()]
    return [f"{count:,}  {reason}" for reason, count in sorted(every, key=lambda x: (-x[1], x[0])) if count]


def comments(found: SearchResult, task: SearchTask, place: int, command: str) -> list[str]:
    """The comments of the preset of the result at a place, 0 for the best."""
    one, best = found.results[place], found.results[0]
    said = [f"Found by `{command}`", counts(found), headline(one, task), f"at the peak: {held(one.at_peak)}"]
    if not found.complete:
        said.append("The search was interrupted: there may be better ones.")
    if place:
        said.append(
            f"the best is {best.candidate.words()} ({best.candidate.options()}): this one takes {loses(best, one)}"
        )
    else:
        said += [f"what binds is {reason}" for reason in binds(found, task)]
        said += [
            f"next: {other.candidate.words()} ({other.candidate.options()}), {duration(other.seconds)}, "
            f"{size(other.peak)}: {loses(best, other)}"
            for other in found.results[1:4]
        ]
    if one.candidate.accumulate > 1:
        said.append(f"run it with train.accumulate={one.candidate.accumulate}")
    return said
