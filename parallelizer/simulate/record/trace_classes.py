"""One training step as a rank of every class: no rank of a world may need more than the dry run says."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from parallelizer.child.shared_calls import SharedCalls
from parallelizer.compiler.observe.equal_layers import longest_run
from parallelizer.simulate.record.action_lines import pipeline_lines
from parallelizer.simulate.record.pipeline_step import alike
from parallelizer.simulate.record.rank_classes import Likeness, RankClass
from parallelizer.simulate.record.trace import Recipe, Trace, tracing_ranks
from parallelizer.styles.application import Program

CHILDREN = 3
"""Models that are traced at most, or one more. A class takes one, or two where equal layers are folded: so 405B
keeps within its ten seconds.
"""


def trace_classes(
    program: Program, model: nn.Module, recipe: Recipe, rank: int = 0, *, fold: bool = True
) -> Trace:
    """As `trace.trace`, with `classes`: every class of ranks, with peak and bytes sent of those traced.

    Of many classes those are traced that hold most, and the class of `rank`. Raises PlanError as `trace`
    does, for any of them.
    """
    with tracing_classes(program, model, recipe, rank, fold=fold) as traced:
        return traced()


@contextmanager
def tracing_classes(
    program: Program,
    model: nn.Module,
    recipe: Recipe,
    rank: int = 0,
    *,
    fold: bool = True,
    shared: SharedCalls | None = None,
) -> Iterator[Callable[[], Trace]]:
    """As `trace_classes`, while the body of the `with` runs. The function that is yielded waits for the trace. `shared` as in
    `tracing_ranks`.
    """
    each = 1 if program.stages is not None or longest_run(program, model) is None or not fold else 2
    likeness = Likeness(program, model)
    ranks = _chosen(program, model, likeness, rank, CHILDREN // each)
    with tracing_ranks(program, model, recipe, ranks, fold=fold, shared=shared) as traces:
        parts = recipe.workload.accumulate
        yield lambda: _with_classes(traces(), program, model, likeness, parts)


def _with_classes(
    traces: list[Trace], program: Program, model: nn.Module, likeness: Likeness, parts: int
) -> Trace:
    """The first of the traces, with all classes of ranks, and of a pipeline the time lines of all stages."""
    if _whatever_part(likeness, traces):
        likeness = Likeness(program, model, causal=False)
    found = {likeness.kind(t.rank): t for t in reversed(traces)}
    classes = tuple(
        _of_stages(c, likeness, traces) or _told(c, found.get(likeness.kind(c.rank)))
        for c in likeness.classes()
    )
    lines = [t.lines for t in traces if t.lines is not None]
    rank = likeness.stage_rank(traces[0].rank)
    pipeline = pipeline_lines(program, model, parts, rank, lines) if lines else None
    return dataclasses.replace(traces[0], classes=classes, pipeline=pipeline)


def worst(trace: Trace) -> tuple[int, RankClass | None]:
    """The highest peak of any class that was traced, and that class; None if it is not known."""
    known = [c for c in trace.classes if c.peak is not None]
    if not known:
        return trace.memory.peak, None
    top = max(known, key=lambda c: c.peak or 0)
    return top.peak or 0, top


def _chosen(program: Program, model: nn.Module, likeness: Likeness, rank: int, number: int) -> list[int]:
    """`rank`, and the smallest ranks of other classes: those that hold most, the lowest ranks first, whose
    part of a sequence has the longest blocks of attention. The class that holds most is among them in any case.
    """
    if program.stages is not None:
        return _of_every_stage(program, model, rank, number)
    own = likeness.kind(rank)
    classes = likeness.classes()
    held = next(c.parameters_bytes for c in classes if likeness.kind(c.rank) == own)
    others = [c for c in classes if likeness.kind(c.rank) != own]
    others.sort(key=lambda c: (-c.parameters_bytes, c.rank))
    if others and others[0].parameters_bytes > held:
        number = max(number, 2)
    return [rank, *(c.rank for c in others[: number - 1])]


def _of_every_stage(program: Program, model: nn.Module, rank: int, number: int) -> list[int]:
    """`rank`, and one for each kind of stages in its line along `pp`, as far as the number goes; the first and the last
    rank of the line, which hold the embedding and the logits, before others.
    """
    mesh = program.mesh
    own, stride = mesh.coordinate(rank)["pp"], mesh.world_size // mesh.sizes["pp"]
    chosen, covered = [own], set(alike(program, model, own))
    for other in (0, mesh.sizes["pp"] - 1, *range(1, mesh.sizes["pp"] - 1)):
        if other not in covered and len(chosen) < number:
            chosen.append(other)
            covered |= set(alike(program, model, other))
    return [rank + (other - own) * stride for other in chosen]


def _of_stages(one: RankClass, likeness: Likeness, traces: Sequence[Trace]) -> RankClass | None:
    """A class of a pipeline's ranks with what a trace of a rank with like stages says of it."""
    at, kind = likeness.stage_rank(one.rank), likeness.kind_of_stage(one.rank)
    for trace in traces:
        if at in trace.stage_ranks and likeness.kind_of_stage(trace.rank) == kind:
            peak, sent = trace.stage_ranks[at]
            return dataclasses.replace(one, peak=peak, sent_bytes=sent)
    return None


def _whatever_part(likeness: Likeness, traces: Sequence[Trace]) -> bool:
    """Whether ranks that differ by their part of the sequence alone did the same: no mask is causal."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations(traces, 2)
        if likeness.shapes(a.rank) == likeness.shapes(b.rank)
    ]
    return bool(pairs) and all((a.ledger, a.memory) == (b.ledger, b.memory) for a, b in pairs)


def _told(one: RankClass, trace: Trace | None) -> RankClass:
    if trace is None:
        return one
    sent = sum(e.wire_bytes for e in trace.ledger)
    return dataclasses.replace(one, peak=trace.memory.peak, sent_bytes=sent)
