"""The table of pipeline schedules. A new one is a file of `schedules/` and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from parallelizer.language.pipeline.schedule import Schedule

SCHEDULE_FILES = (
    "gpipe",
    "one_forward_one_backward",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
"""The files of `schedules/`, in the order of the documentation."""


def _found() -> dict[str, Schedule]:
    modules = (
        importlib.import_module(f"parallelizer.language.pipeline.schedules.{f}") for f in SCHEDULE_FILES
    )
    return {module.SCHEDULE.name: module.SCHEDULE for module in modules}


SCHEDULES: Mapping[str, Schedule] = _found()
"""Every schedule by the name that a preset gives it."""
