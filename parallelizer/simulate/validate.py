"""What is wrong with a program: everything that can be found before a rank starts.

Compiling the program has found what its files, the model and the mesh tell. Here one step of it is followed on a fake world,
which shows mistakes that raise no error, and one step is traced, which shows what the plan wastes. All commands, the training
recipe and `parallelizer.validate` get their findings from here, so that the same program gets the same findings everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from parallelizer.child import Children, WorldError, in_children
from parallelizer.compiler.checks.idle_rules import idle_rules
from parallelizer.compiler.observe.module_calls import observe
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span, has_errors, in_order
from parallelizer.language.workload import Workload
from parallelizer.runtime.step import Loss
from parallelizer.simulate.all_checks import check_followed, check_traced
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.checks.tp_crosses_nodes import nodes_of, tp_crosses_nodes
from parallelizer.simulate.checks.traced_step import Traced
from parallelizer.simulate.follow.flow import FollowedStep, StepFailure, failure_alone, follow
from parallelizer.simulate.record.trace import Recipe, Trace, tracing
from parallelizer.simulate.record.trace_classes import tracing_classes
from parallelizer.simulate.trace_failed import CODE as TRACE_FAILED
from parallelizer.simulate.trace_failed import broken_off, fails_without_the_plan
from parallelizer.styles.application import Program
from parallelizer.styles.sizes import TENSOR_AXES

Findings = tuple[Diagnostic, ...]


@dataclass(frozen=True)
class Validation:
    """Everything that was found, errors last. `flow` is the step that was followed and `trace` the step that was
    traced, as the rank that was asked for; None where that was not done or failed.
    """

    found: Findings
    flow: FollowedStep | None = None
    trace: Trace | None = None


@contextmanager
def validating(
    program: Program,
    model: nn.Module,
    recipe: Recipe | None,
    *,
    also: Iterable[Diagnostic] = (),
    hardware: Mapping[str, Any] | None = None,
    nodes: Sequence[int] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    optimizer_span: Span | None = None,
    rank: int = 0,
    classes: bool = False,
) -> Iterator[Callable[[], Validation]]:
    """Validate a program while the body of the `with` runs. The function that is yielded waits for the result.

    `model` is on meta, as it was compiled, and left as it is. Without a `recipe` no step is run. `also` are findings that
    the caller has already. `hardware` is the config of that name; `nodes` are the numbers of ranks on each node, where they
    are known, and otherwise nodes of this hardware are filled one after the other. `optimizer` is the optimizer's config,
    which is written at `optimizer_span`. The step is traced as `rank`; with `classes` it is traced as a rank of every other
    class too, which the findings do not need. Steps run in child processes, so this process must have no process group.
    """
    with (
        following(program, model, recipe) as followed,
        looking_through(program, model, recipe, rank, classes, optimizer, optimizer_span) as traced,
    ):

        def finish() -> Validation:
            flow, wrong = followed()
            trace, seen = traced()
            if trace is None and recipe is not None and flow is None and not wrong:
                seen = _of_the_model(
                    seen, program, model, recipe
                )  # nothing was followed: the model alone may be to blame
            # One step that does not run is told of once. Where the plan is to blame, that has been explained.
            if trace is None and has_errors(wrong):
                seen = _without_trace_failed(seen)
            elif trace is None:
                wrong = _without_trace_failed(wrong)
            dealt = nodes_of(program.mesh, hardware or {}) if nodes is None else nodes
            crossing = tp_crosses_nodes(program.mesh, dealt, hardware or {}, trace.ledger if trace else ())
            known = (*program.diagnostics, *also, *idle_rules(program))
            return Validation(in_order((*known, *crossing, *wrong, *seen)), flow, trace)

        yield finish


@contextmanager
def following(
    program: Program, model: nn.Module, recipe: Recipe | None
) -> Iterator[Callable[[], tuple[FollowedStep | None, Findings]]]:
    """Follow one step of a program on a fake world, in a child, while the body of the `with` runs. The function that is yielded
    waits for the step, and returns it with what is wrong in it.

    Nothing is followed without a `recipe`, nor on a mesh of data axes alone: their ranks do the same with other tokens.
    """
    if recipe is None or program.mesh.size("cp", *TENSOR_AXES) == 1:
        yield lambda: (None, ())
        return
    given = program, model, recipe.workload, recipe.loss
    with Children([(follow, *given)]) as children:

        def finish() -> tuple[FollowedStep | None, Findings]:
            try:
                (flow,) = children.results()
                alone = None if flow.failure is None else _fails_alone(*given)
            except WorldError as error:
                return None, broken_off(error).diagnostics
            except PlanError as error:
                return None, error.diagnostics
            return flow, check_followed(Followed(program, model, flow, alone))

        yield finish


@contextmanager
def looking_through(
    program: Program,
    model: nn.Module,
    recipe: Recipe | None,
    rank: int,
    classes: bool,
    optimizer: Mapping[str, Any] | None,
    optimizer_span: Span | None,
) -> Iterator[Callable[[], tuple[Trace | None, Findings]]]:
    """Trace one step of a program, in a child, while the body of the `with` runs. The function that is yielded waits for the
    trace, and returns it with what it shows of waste, or with why there is none. Nothing is traced without a `recipe`.
    """
    if recipe is None:
        yield lambda: (None, ())
        return
    with (tracing_classes if classes else tracing)(program, model, recipe, rank) as traced:

        def finish() -> tuple[Trace | None, Findings]:
            try:
                trace = traced()
            except PlanError as error:
                return None, error.diagnostics
            calls = observe(model, recipe.workload, trace.folded)
            accumulate = recipe.workload.accumulate
            return trace, check_traced(
                Traced(program, model, trace, calls, accumulate, optimizer or {}, optimizer_span)
            )

        yield finish


def _fails_alone(program: Program, model: nn.Module, workload: Workload, loss: Loss) -> StepFailure | None:
    """Why the model does not run without the plan. What is taken for the model's own mistake is so with all its layers: a
    forward may want them to be as many as they are.
    """
    given = program, model, workload, loss
    failure: StepFailure | None = in_children([(failure_alone, *given)])[0]
    if failure is None or not failure.anywhere:
        return failure
    whole: StepFailure | None = in_children([(failure_alone, *given, False)])[0]
    return whole or replace(failure, anywhere=False)


def _of_the_model(found: Findings, program: Program, model: nn.Module, recipe: Recipe) -> Findings:
    """What a trace that failed has told, or else that the model does not run without the plan either."""
    if not any(one.code == TRACE_FAILED for one in found):
        return found
    try:
        alone = _fails_alone(program, model, recipe.workload, recipe.loss)
    except (
        WorldError,
        PlanError,
    ):  # of a loss of another form, or a process that is gone, the trace has told
        return found
    if alone is None or not alone.anywhere:
        return found
    return (*_without_trace_failed(found), fails_without_the_plan(alone))


def _without_trace_failed(found: Iterable[Diagnostic]) -> Findings:
    return tuple(one for one in found if one.code != TRACE_FAILED)
