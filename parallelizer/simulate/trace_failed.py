"""`trace-failed`: a step that does not run on fake tensors, so that nothing can be said of it.

A traced step that raises is explained in the child that ran it, which knows the operator and the module (`explained`). A
child that ends without a word broke off (`broken_off`). A followed step that fails is the plan's fault unless the model
fails without the plan too, which is `fails_without_the_plan`: an error where real tensors would fail as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from parallelizer.child.children import WorldError
from parallelizer.compiler.observe.running_module import Running
from parallelizer.compiler.observe.users_code import written_at
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Related
from parallelizer.simulate.cast_misused import cast_misused
from parallelizer.simulate.experts_misused import experts_misused
from parallelizer.simulate.fake_world import remedy
from parallelizer.simulate.follow.flow import StepFailure
from parallelizer.simulate.places import Places
from parallelizer.simulate.whole_numbers import advised, whole_numbers_of
from parallelizer.styles.application import Program

CODE = "trace-failed"

_MADE = {"positions": "int64 [rows, tokens]", "document-mask": "bool [rows, 1, tokens, tokens]"}
"""What the batch entries are that a plan makes."""

_PLACES = {"loss": "the loss", "clip": "the clipping", "optimizer": "the optimizer"}


@dataclass
class Reached:
    """How far a step has come: the operator that runs or, when `done`, ran last, in which phase and module."""

    operator: str = ""
    done: bool = False
    phase: str = ""
    module: str = ""


@contextmanager
def explained(program: Program, running: Running, reached: Callable[[], Reached]) -> Iterator[None]:
    """Turn whatever a step raises on fake tensors into a PlanError of one diagnostic. `reached` tells how far it came."""
    try:
        yield
    except PlanError:
        raise
    except (Exception, SystemExit) as error:
        raise PlanError([_diagnostic(error, program, running, reached())]) from error


def broken_off(error: WorldError) -> PlanError:
    """What to raise when the process of a dry run ended with `error`, outside the step or without a word."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return PlanError([Diagnostic(CODE, f"the dry run broke off: {lines[-1]}", None, None, "warning")])


def fails_without_the_plan(failure: StepFailure, places: Places) -> Diagnostic:
    """What to say of a step that fails on fake tensors whatever the plan; `failure` is that of the unsharded step."""
    where = failure.module or "the root"
    if failure.anywhere:
        return _model_failed(failure, places)
    message = (
        f"the step cannot run on fake tensors: {where} at {failure.operator or 'its start'}: {failure.error}"
    )
    reason = "" if failure.text in ("", failure.operator) else f": {failure.text}"
    return Diagnostic(CODE, message + reason, failure.span, failure.remedy, "warning")


def _model_failed(failure: StepFailure, places: Places) -> Diagnostic:
    """A model, or a loss, that raises on real tensors too, with what the command line gives it, and at the model's class where
    no code of the user's is known.
    """
    where = "the loss" if failure.phase == "loss" else failure.module or "the root"
    stage = f"{failure.phase} of " if failure.phase in ("forward", "backward") else ""
    # Before an error of Python's own any operator may have run.
    at = f" at {failure.operator}" if failure.error == "RuntimeError" and failure.computes else ""
    reason = f"{failure.error}: {failure.text}" if failure.text else failure.error
    what = "the loss" if failure.phase == "loss" else "the model"
    entries = () if failure.phase == "loss" else places.made
    made = [Related(one.span, f"{one.name}: {_MADE[one.make or '']}") for one in entries]
    given = "with the entries that the plan adds to its batch" if made else "with or without the plan"
    return Diagnostic(
        "model-failed",
        f"{what} does not run, {given}: {stage}{where} fails{at}: {reason}",
        failure.span or (places.loss if failure.phase == "loss" else places.model),
        f"correct {what}, or its sizes in the configuration",
        related=(*(Related(span, "this is set here") for span in places.arguments), *made),
    )


def _diagnostic(error: BaseException, program: Program, running: Running, reached: Reached) -> Diagnostic:
    module = running.failed_with(error) or reached.module
    misused = cast_misused(error, program, module) or experts_misused(error, program, module)
    if misused is not None:
        return misused
    where = module or _PLACES.get(reached.phase, "the root")
    if module and reached.phase == "backward":
        where += " in backward"
    operator = (
        f"{'after' if reached.done else 'at'} {reached.operator}" if reached.operator else "at its start"
    )
    first = (str(error).strip().split("\n") or [""])[0]
    reason = "" if first in ("", reached.operator) else f": {first}"
    message = f"the step cannot run on fake tensors: {where} {operator}: {type(error).__name__}{reason}"
    span = written_at(error)
    inside = module or reached.phase not in _PLACES
    rule = next((a.rule for a in program if inside and a.module == module), None)
    related: tuple[Related, ...] = ()
    if rule and span:
        related = (Related(rule.span, f"the rule of {module or 'the root'}"),)
    numbers = whole_numbers_of(error, program.mesh.sizes["tp"], running.path_of)
    help_text, near = advised(program, numbers, remedy(error))
    if near is not None and near.rule is not rule:
        related += (Related(near.rule.span, f"the rule of {near.module}"),)
    return Diagnostic(CODE, message, span or (rule.span if rule else None), help_text, "warning", related)
