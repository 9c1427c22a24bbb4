"""The dry run of a whole candidate: what is printed of it is what `plan` says of its preset."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from parallelizer.child.children import WorldError
from parallelizer.child.shared_calls import SharedCalls
from parallelizer.compiler.observe.equal_layers import SHORT, WORTH_ANOTHER, Run
from parallelizer.configuration.setup import Setup
from parallelizer.configuration.step_time import step_time
from parallelizer.configuration.validate import validating
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, has_errors
from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.stages import WHOLE_BACKWARD
from parallelizer.propose.search.task import SearchTask
from parallelizer.simulate.record.pipeline_step import FEW, FEW_SPLIT
from parallelizer.simulate.record.trace import Trace
from parallelizer.simulate.record.trace_classes import tracing_classes, worst
from parallelizer.simulate.time.predict import StepTime
from parallelizer.simulate.validate import Validation

PLAYED = 20
"""Layers of further microbatches that are played in the time that one is stepped through."""


@dataclass(frozen=True)
class TracedWhole:
    """A candidate that was traced whole: the peak in bytes of the rank that needs most, what rank 0 holds at its peak by
    category, and the time of a step.
    """

    candidate: Candidate
    peak: int
    at_peak: Mapping[str, int]
    time: StepTime

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.time.seconds


@dataclass(frozen=True)
class NotTraced:
    """A candidate whose preset is refused, or whose step cannot be traced, with the reason."""

    candidate: Candidate
    reason: str


def trace_whole(
    task: SearchTask, model: nn.Module, candidate: Candidate, text: str
) -> TracedWhole | NotTraced:
    """Dry-run the preset `text` of a candidate, read as `plan` reads it."""
    with tracing_whole(task, model, candidate, text) as traced:
        return traced()


@contextmanager
def tracing_whole(
    task: SearchTask,
    model: nn.Module,
    candidate: Candidate,
    text: str,
    *,
    check: bool = False,
    shared: SharedCalls | None = None,
) -> Iterator[Callable[[], TracedWhole | NotTraced]]:
    """As `trace_whole`, while the body of the `with` runs. The function that is yielded waits for the dry run. With `check`, a
    preset in which `validate` finds an error is not traced. Several candidates of one model may have `shared` calls.
    """
    with ExitStack() as stack:
        try:
            setup = task.setup_of(text, candidate)
            program = setup.compile(model)
            if has_errors(program.diagnostics):
                raise PlanError(program.diagnostics)
            traced: Callable[[], Trace]
            if check:
                validation = stack.enter_context(
                    validating(setup, program, model, classes=True, shared=shared)
                )
                traced = functools.partial(_valid, validation)
            else:
                traced = stack.enter_context(tracing_classes(program, model, setup.recipe(), shared=shared))
        except PlanError as error:
            refused = NotTraced(candidate, reason(error.diagnostics))
            yield lambda: refused
            return
        yield lambda: _judged(candidate, setup, traced)


def _valid(validation: Callable[[], Validation]) -> Trace:
    """The trace of a validation without errors. Raises PlanError."""
    done = validation()
    if has_errors(done.found) or done.trace is None:
        raise PlanError(done.found)
    return done.trace


def _judged(candidate: Candidate, setup: Setup, traced: Callable[[], Trace]) -> TracedWhole | NotTraced:
    """What the dry run of a candidate says of it."""
    try:
        step = traced()
    except PlanError as error:
        return NotTraced(candidate, reason(error.diagnostics))
    except WorldError as error:
        return NotTraced(candidate, (str(error).strip().splitlines() or ["no reason"])[-1])
    time = step_time(setup, step)
    if time is None:
        return NotTraced(candidate, "its time is not known")
    return TracedWhole(candidate, worst(step)[0], step.memory.at_peak, time)


def reason(found: Sequence[Diagnostic]) -> str:
    """The first error in words; without one, what else was found: a step that cannot be traced is a warning to others."""
    first = next((d for d in found if d.severity == "error"), found[0] if found else None)
    return "the step cannot be traced" if first is None else f"{first.code}: {first.message}"


def effort(candidate: Candidate, run: Run | None) -> int:
    """How many layers a dry run of the candidate steps through, as a measure of its time. Those of a pipeline are played for
    every microbatch.
    """
    layers = run.count if run is not None else SHORT
    if candidate.pp > 1:
        on_rank = candidate.stages_per_rank * max(candidate.layers, default=1)
        ranks = min(3, candidate.pp)
        few = FEW if candidate.schedule in WHOLE_BACKWARD else FEW_SPLIT
        parts = min(candidate.accumulate, FEW) * min(candidate.microbatches, few)
        return ranks * on_rank * (1 + parts + candidate.accumulate * candidate.microbatches // PLAYED)
    parts = 1 + min(candidate.accumulate, FEW)
    if candidate.share < 1:  # two runs of equal layers
        fewer = round(min(candidate.share, 1 - candidate.share) * layers)
        return parts * (6 * SHORT + 2 if fewer >= WORTH_ANOTHER else 2 * (SHORT + fewer) + 1)
    return parts * (2 * SHORT + 1)
