"""The reason why one rank failed: in one line, in full, and whether it only lost the connection to another
rank.
"""

from __future__ import annotations

import math
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parallelizer import torch_private
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.runtime.exception_notes import planned_module, raised_by_torch
from parallelizer.runtime.lost_rank import is_of_another, what_was_said


class LaunchError(Exception):
    """Ranks could not be started, or not all of them finished. `help` is the fix, if one is known."""

    def __init__(self, message: str, help: str | None = None) -> None:
        super().__init__(message, help)
        self.message = message
        self.help = help

    def __str__(self) -> str:
        return f"{self.message}\n{self.help}" if self.help else self.message


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: in a line and in full, with a PlanError's diagnostics; `when` is monotonic time.

    `log` is the file that its traceback went to, where `text` does without: an operation failed in a module of
    the plan, and the notes on the exception say which and how its tensors lay. `lost` says that it is another rank that
    ended.
    """

    rank: int
    line: str
    text: str = ""
    diagnostics: tuple[Diagnostic, ...] | None = None
    when: float = -math.inf
    log: Path | None = None
    lost: bool = False


def first_line(error: BaseException) -> str:
    """An exception's type, and what it says first; of one that torch.compile wrapped, those of what was raised."""
    raised = torch_private.raised_while_compiling(error)
    line = (raised or f"{type(error).__name__}: {error}").strip().splitlines()[0].rstrip(": ")
    return f"{line} (in torch.compile)" if raised else line


def failure_of(
    rank: int, error: BaseException, code: int, log_dir: Path | None, inside: str = __file__
) -> Failure:
    """What is told of a rank that an exception has ended with exit code `code`.

    Its traceback, from the first frame that is not of the file `inside`, is appended to `log_dir/rank<k>.log`, but for a
    PlanError, which says all.
    """
    inner = error.__traceback__
    while inner and inner.tb_next and inner.tb_frame.f_code.co_filename == inside:
        inner = inner.tb_next
    text = "".join(traceback.format_exception(type(error), error, inner))
    if isinstance(error, PlanError):
        return Failure(
            rank, f"failed (exit code {code}): {first_line(error)}", text, error.diagnostics, time.monotonic()
        )
    log = None
    if log_dir is not None:
        log = log_dir / f"rank{rank}.log"
        with suppress(OSError), open(log, "a", errors="backslashreplace") as stream:
            stream.write(text)
    if is_of_another(error):
        return Failure(
            rank, f"lost another rank: {what_was_said(error)}", text, None, time.monotonic(), log, lost=True
        )
    planned = planned_module(error)
    if planned is not None and planned.is_laid_out and raised_by_torch(error) and log is not None:
        text = "\n".join(error.__notes__)
    else:
        log = None
    return Failure(rank, f"failed (exit code {code}): {first_line(error)}", text, None, time.monotonic(), log)
