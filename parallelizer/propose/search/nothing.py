"""Why a search has no result."""

from __future__ import annotations

from collections.abc import Sequence

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.diagnostics.units import size
from parallelizer.propose.search.found import STATES, SearchResult
from parallelizer.propose.search.task import SearchTask


def too_little(found: SearchResult) -> bool:
    """Whether it is the memory that leaves nothing."""
    return bool(found.too_large or found.pruned[STATES]) and not found.results and found.complete


def nothing(found: SearchResult, task: SearchTask, changes: Sequence[str] = ()) -> Diagnostic:
    """The finding of a search without results: by how much the nearest candidate does not fit, or what rules out most. `changes`
    are those with which something would fit.
    """
    if found.too_large:
        nearest = found.too_large[0]
        message = (
            f"no candidate fits {size(task.memory)}: {nearest.candidate.words()} ({nearest.candidate.options()}) comes nearest "
            f"and needs {size(nearest.peak)}, {size(nearest.peak - task.memory)} too much"
        )
        return Diagnostic("search-nothing", message, None, _advice(changes))
    if found.failed:
        first = found.failed[0]
        message = f"no candidate could be dry-run: {first.candidate.words()}: {first.reason}"
        return Diagnostic("search-nothing", message, None, "`parallelizer validate` says more of a preset")
    if not found.complete:
        return Diagnostic(
            "search-nothing", "the search was interrupted before its first dry run", None, "let it run longer"
        )
    if not found.total:
        message = f"no candidate for {task.gpus:,} GPUs is within the limits: {task.within.text() or 'those of `parallel`'}"
        advice = (
            "change the number of GPUs or the limits: the sizes of the axes multiply to the number of GPUs, "
            "and `rows` divides the rows of a data rank"
        )
        return Diagnostic("search-nothing", message, None, advice)
    if found.states:
        message = (
            f"no candidate fits {size(task.memory)}: parameters and gradients alone need {size(found.states)} on each device, "
            f"{size(found.states - task.memory)} too much"
        )
        advice = "take more GPUs, or a larger --memory; ++parallel.styles.fsdp.cpu_offload=true keeps them in the host's memory"
        return Diagnostic("search-nothing", message, None, "; or ".join(changes) or advice)
    counts = {**found.excluded, **{reason: count for reason, count in found.pruned.items() if count}}
    most = max(counts, key=lambda one: (counts[one], one))
    if found.total == 1:
        message = f"the only candidate is ruled out: {most}"
    else:
        message = f"none of the {found.total:,} candidates is left, {counts[most]:,} of them for this reason: {most}"
    if most == STATES:
        return Diagnostic("search-nothing", message, None, _advice(changes))
    advice = "change gpus, train.batch_size, hardware.devices_per_node, or a limit"
    limits = task.within.text()
    return Diagnostic(
        "search-nothing", message, None, f"{advice}: {limits}" if limits else f"{advice} of --within"
    )


def _advice(changes: Sequence[str]) -> str:
    return (
        "; or ".join(changes)
        or "take more GPUs, a shorter sequence, or ++parallel.styles.fsdp.cpu_offload=true"
    )
