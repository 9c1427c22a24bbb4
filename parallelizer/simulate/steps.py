"""The steps of a program that are run before the real one: one is followed on a fake world, one is traced, each in children
of this process, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from parallelizer.child.children import WorldError, in_children
from parallelizer.child.shared_calls import SharedCalls
from parallelizer.compiler.observe.equal_layers import longest_run
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.plan import BATCH_AXES, DATA_AXES, TENSOR_AXES
from parallelizer.language.workload import Workload
from parallelizer.runtime.step import Loss
from parallelizer.simulate.follow.flow import FollowedStep, StepFailure, failure_alone, follow, followed_facts
from parallelizer.simulate.follow.statistics import FollowedStatistics, follow_statistics, statistics_facts
from parallelizer.simulate.record.additive_loss import TriedLoss, refuse_other_than_sums
from parallelizer.simulate.record.trace import Recipe, Trace, tracing
from parallelizer.simulate.record.trace_classes import tracing_classes
from parallelizer.simulate.trace_failed import CODE as TRACE_FAILED
from parallelizer.simulate.trace_failed import broken_off
from parallelizer.styles.application import Program


@dataclass(frozen=True)
class Steps:
    """What came of the steps. `flow` is the one that was followed and `trace` the one that was traced; where there is none,
    `not_followed` and `not_traced` say why. `alone` is why the model fails without the plan too, where a step failed.
    `statistics` are those that its forward takes over the tokens of one rank, where ranks have different rows.
    """

    flow: FollowedStep | None = None
    trace: Trace | None = None
    not_followed: tuple[Diagnostic, ...] = ()
    not_traced: tuple[Diagnostic, ...] = ()
    alone: StepFailure | None = None
    statistics: FollowedStatistics | None = None


@contextmanager
def running_steps(
    program: Program,
    model: nn.Module,
    recipe: Recipe | None,
    rank: int,
    classes: bool,
    shared: SharedCalls | None = None,
) -> Iterator[Callable[[], Steps]]:
    """Run the steps while the body of the `with` runs. The function that is yielded waits for them. Programs of one model and one
    loss may have `shared` calls: what is equal for several of them then runs once.

    Without a `recipe` none is run. On a mesh of data axes alone none is followed: its ranks do the same with other tokens. Of a
    pipeline the whole model is, since the trace has the stages of one rank.
    """
    if recipe is None:
        yield Steps
        return
    given = program, model, recipe.workload, recipe.loss
    follows = program.mesh.size("pp", "cp", *TENSOR_AXES) > 1
    with (
        SharedCalls() if shared is None else nullcontext(shared) as calls,
        (tracing_classes if classes else tracing)(program, model, recipe, rank, shared=calls) as traced,
    ):
        following = rows = None
        tried, divides = _parts_tried(program, recipe.workload), _divides_rows(program, recipe.workload)
        flow_facts = followed_facts(program, recipe.workload) if follows else None
        row_facts = statistics_facts(recipe.workload) if divides else None
        layers = longest_run(program, model) if follows or divides else None
        if follows:
            following = calls.start((_followed, tried, flow_facts, layers), _followed, *given)
        if divides:
            rows = calls.start((follow_statistics, row_facts, layers), follow_statistics, *given)

        def finish() -> Steps:
            flow: FollowedStep | None = None
            trace: Trace | None = None
            alone: StepFailure | None = None
            not_followed: tuple[Diagnostic, ...] = ()
            not_traced: tuple[Diagnostic, ...] = ()
            try:
                flow = following() if following is not None else None
            except WorldError as error:
                not_followed = broken_off(error).diagnostics
            except PlanError as error:
                not_followed = error.diagnostics
            try:
                trace = traced()
            except PlanError as error:
                not_traced = error.diagnostics
            failed = flow is not None and flow.failure is not None
            if failed or (not follows and any(one.code == TRACE_FAILED for one in not_traced)):
                # What is taken for the model's own mistake must be so with all its layers: a forward may want them to be as
                # many as they are.
                try:
                    [alone] = in_children([(failure_alone, *given)])
                    if alone is not None and alone.anywhere:
                        [whole] = in_children([(failure_alone, *given, False)])
                        alone = whole or replace(alone, anywhere=False)
                except (WorldError, PlanError) as error:
                    # Where no step was followed, the trace has told of a loss of another form, or a process that is gone.
                    if follows:
                        flow, alone = None, None
                        told = broken_off(error) if isinstance(error, WorldError) else error
                        not_followed = told.diagnostics
            return Steps(flow, trace, not_followed, not_traced, alone, _first(rows))

        yield finish


def _divides_rows(program: Program, workload: Workload) -> bool:
    """Whether no forward sees all tokens of the batch. Over cp a statistic of all rows is one of parts of them too."""
    microbatches = 1 if program.stages is None else program.stages.pipeline.microbatches or 1
    return workload.accumulate * microbatches * program.mesh.size(*DATA_AXES) > 1


def _first(result: Callable[[], Any] | None) -> Any:
    """What a child has found. None where there is none, or where the model does not run: the other steps say so."""
    try:
        return result() if result is not None else None
    except (WorldError, PlanError):
        return None


def _parts_tried(program: Program, workload: Workload) -> object:
    """Which parts of a batch the loss is tried on while a step is followed; None where it is tried elsewhere."""
    if program.stages is None:
        return None
    microbatches = program.stages.pipeline.microbatches or 1
    return workload.accumulate * microbatches * program.mesh.size(*BATCH_AXES) > 1


def _followed(program: Program, model: nn.Module, workload: Workload, loss: Loss) -> FollowedStep:
    """The step that was followed. Of a pipeline the loss is tried here, since a trace has it on the last stage alone.

    Raises PlanError for a loss of another form.
    """
    if program.stages is None:
        return follow(program, model, workload, loss)
    seen = TriedLoss(loss)
    flow = follow(program, model, workload, seen.watched())
    refuse_other_than_sums(seen, workload, program.mesh, program.stages.pipeline.microbatches or 1)
    return flow
