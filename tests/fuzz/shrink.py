"""Makes a failing case as small as it can be made in a bounded number of tries."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.corpus import Case

MAX_TRIES = 400


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = MAX_TRIES) -> Case:
    """The case with as much of its file left out as still `fails`: halves first, then lines, then characters."""
    if case.kind == "override":
        return case
    for joint in (b"\n", b""):
        parts = case.content.split(joint) if joint else [bytes([b]) for b in case.content]
        size = len(parts) // 2
        while size and tries > 0:
            at = 0
            while at < len(parts) and tries > 0:
                tries -= 1
                fewer = parts[:at] + parts[at + size :]
                if fails(case.with_content(joint.join(fewer))):
                    parts = fewer
                else:
                    at += size
            size //= 2
        case = case.with_content(joint.join(parts))
    return case
