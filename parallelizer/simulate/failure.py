"""What a user is told of a step that cannot be traced: the module, the operator, and the line of code."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from parallelizer.diagnostics import Diagnostic, PlanError, Related, Span
from parallelizer.program import Program
from parallelizer.simulate.memory import MemoryTracker, Reached
from parallelizer.simulate.modules import Running
from parallelizer.simulate.whole_numbers import advised, whole_numbers_of
from parallelizer.simulate.world import WorldError

CODE = "trace-failed"
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_NOISE = ("torch._subclasses.fake_tensor", "torch.distributed.tensor._collective_utils")
"""Loggers that print the traceback of an error that is raised all the same, or what CPUs do in place of an
all-to-all.
"""

_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")
_HELP_VALUES = "it asks for values, and fake tensors have none: do without `.item()`, `if tensor` and shapes that depend on data"
_HELP_KERNEL = "give it an implementation that only says the shapes: torch.library.register_fake"
_HELP_OTHER = (
    "if the model runs by itself on real tensors, it needs their values or memory here, or the plan is wrong"
)
_PLACES = {"loss": "the loss", "clip": "the clipping", "optimizer": "the optimizer"}


@contextmanager
def explained(program: Program, running: Running, memory: MemoryTracker) -> Iterator[None]:
    """Turn whatever a step raises on fake tensors into a PlanError of one diagnostic, with nothing printed.

    To be entered in a process that does nothing else: torch's own reports stay silent from then on.
    """
    hush()
    try:
        yield
    except PlanError:
        raise
    except (Exception, SystemExit) as error:
        raise PlanError([_diagnostic(error, program, running, memory.reached)]) from error


def hush() -> None:
    """Keep torch from printing what is said otherwise, or not worth it."""
    for name in _NOISE:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def broken_off(error: WorldError) -> PlanError:
    """What to raise when the process of a dry run ended with `error`, outside the step or without a word."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return PlanError([Diagnostic(CODE, f"the dry run broke off: {lines[-1]}", None, None, "warning")])


def _diagnostic(error: BaseException, program: Program, running: Running, reached: Reached) -> Diagnostic:
    module = running.failed_with(error) or reached.module
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


def remedy(error: BaseException) -> str:
    """What to do about an operator that does not run on fake tensors."""
    if type(error).__name__ in _VALUES:
        return _HELP_VALUES
    text = str(error)
    lacking = "no fake impl" in text or "'Meta' backend" in text
    return _HELP_KERNEL if lacking or type(error).__name__ == "UnsupportedOperatorException" else _HELP_OTHER


def written_at(error: BaseException) -> Span | None:
    """The innermost expression of somebody else's code than torch's and ours that the error came through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", *_OURS)) and frame.lineno is not None:
            return _span(frame.filename, frame.lineno, frame.end_lineno, frame.colno, frame.end_colno)
    return None


def written_here() -> Span | None:
    """As `written_at`, of what is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(("<", *_OURS)):
            line, end, start, stop = next(
                itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
            )
            return _span(frame.f_code.co_filename, line or frame.f_lineno, end, start, stop)
        frame = frame.f_back
    return None


def _span(file: str, line: int, end: int | None, start: int | None, stop: int | None) -> Span:
    path = os.path.relpath(file)
    file = file if path.startswith("..") else path
    return (
        Span(file, line)
        if start is None or stop is None or end != line
        else Span(file, line, start + 1, stop + 1)
    )
