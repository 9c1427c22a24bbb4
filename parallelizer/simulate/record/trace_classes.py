"""One training step as a rank of every class: no rank of a world may need more than the dry run says."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from parallelizer.child.children import Children, WorldError
from parallelizer.child.shared_calls import SharedCalls
from parallelizer.compiler.observe.equal_layers import runs_of
from parallelizer.simulate.record.action_lines import pipeline_lines
from parallelizer.simulate.record.pipeline_step import alike
from parallelizer.simulate.record.rank_classes import Likeness, RankClass
from parallelizer.simulate.record.trace import (
    Recipe,
    StagesTrace,
    Trace,
    record_stages,
    tracing,
    tracing_ranks,
)
from parallelizer.simulate.trace_failed import broken_off
from parallelizer.styles.application import Program

CHILDREN = 3
"""Models that are traced at most, or one more. A class takes one, or two and more where equal layers are folded: so 405B
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
    `tracing_ranks`; of a pipeline nothing is shared.
    """
    likeness = Likeness(program, model)
    if program.stages is not None:
        with _tracing_stages(program, model, recipe, rank, likeness) as traced:
            yield traced
        return
    each = len(runs_of(program, model)) + 1 if fold else 1
    ranks = _chosen(likeness, rank, max(CHILDREN // each, 1))
    with tracing_ranks(program, model, recipe, ranks, fold=fold, shared=shared) as traces:
        yield lambda: _with_classes(traces(), program, model, likeness)


def _with_classes(traces: list[Trace], program: Program, model: nn.Module, likeness: Likeness) -> Trace:
    """The first of the traces, with all classes of ranks."""
    if _whatever_part(likeness, traces):
        likeness = Likeness(program, model, causal=False)
    found = {likeness.kind(t.rank): t for t in reversed(traces)}
    classes = tuple(_told(c, found.get(likeness.kind(c.rank))) for c in likeness.classes())
    return dataclasses.replace(traces[0], classes=classes)


@contextmanager
def _tracing_stages(
    program: Program, model: nn.Module, recipe: Recipe, rank: int, likeness: Likeness
) -> Iterator[Callable[[], Trace]]:
    """The trace of a rank of a pipeline, with all classes of ranks and the time lines of all stages."""
    others = _of_every_stage(program, model, rank, CHILDREN)[1:]
    calls: list[tuple[Any, ...]] = [(record_stages, program, model, recipe, other) for other in others]
    with tracing(program, model, recipe, rank) as traced, Children(calls) as children:

        def finish() -> Trace:
            first = traced()
            try:
                found = [StagesTrace(rank, first.stage_ranks, first.lines), *children.results()]
            except WorldError as error:
                raise broken_off(error) from error
            classes = tuple(_of_stages(c, likeness, found) for c in likeness.classes())
            lines = [one.lines for one in found if one.lines is not None]
            place, parts = likeness.stage_rank(rank), recipe.workload.accumulate
            pipeline = pipeline_lines(program, model, parts, place, lines) if lines else None
            return dataclasses.replace(first, classes=classes, pipeline=pipeline)

        yield finish


def worst(trace: Trace) -> tuple[int, RankClass | None]:
    """The highest peak of any class that was traced, and that class; None if it is not known."""
    known = [c for c in trace.classes if c.peak is not None]
    if not known:
        return trace.memory.peak, None
    top = max(known, key=lambda c: c.peak or 0)
    return top.peak or 0, top


def _chosen(likeness: Likeness, rank: int, number: int) -> list[int]:
    """`rank`, and the smallest ranks of other classes: those that hold most, the lowest ranks first, whose
    part of a sequence has the longest blocks of attention. The class that holds most is among them in any case.
    """
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


def _of_stages(one: RankClass, likeness: Likeness, traces: Sequence[StagesTrace]) -> RankClass:
    """A class of a pipeline's ranks with what a trace of a rank with like stages says of it, if there is one."""
    at, kind = likeness.stage_rank(one.rank), likeness.kind_of_stage(one.rank)
    for trace in traces:
        if at in trace.stage_ranks and likeness.kind_of_stage(trace.rank) == kind:
            peak, sent = trace.stage_ranks[at]
            return dataclasses.replace(one, peak=peak, sent_bytes=sent)
    return one


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
