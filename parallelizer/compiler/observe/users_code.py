"""The line of the user's own code that raised an exception or that is running."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.diagnostics.package_folder import ROOT

_OURS = (str(Path(torch.__file__).parent), str(ROOT))


def written_at(error: BaseException) -> Span | None:
    """The innermost expression outside of torch's code and ours that the error came through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", *_OURS)) and frame.lineno is not None:
            return _span(frame.filename, frame.lineno, frame.end_lineno, frame.colno, frame.end_colno)
    return None


def written_here(within: str | None = None) -> Span | None:
    """As `written_at`, of what is running. With `within`, only what the code of that file has called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != within:
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
