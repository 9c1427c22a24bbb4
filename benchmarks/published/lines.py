"""What published runs do that a configuration does not say, done to the time line of its dry run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.published.compose import KEPT_PARTS, Composed
from benchmarks.published.fused import fused_parts, rows_in_place, without
from parallelizer.simulate.record.operators import Issued, Moment


def line_of(composed: Composed, traced: Sequence[Moment], count: int) -> list[Moment]:
    """The time line of a step of `count` parts."""
    parts, rest = _parts(traced)
    if composed.fused:
        parts = fused_parts(parts)
    if composed.rows_in_place:
        parts = [rows_in_place(part) for part in parts]
    if count > KEPT_PARTS:
        parts += [parts[-1]] * (count - KEPT_PARTS)
    if composed.deferred:
        parts = [
            without(part, lambda m, at=i: m.unit and not _kept(m, at, len(parts)))
            for i, part in enumerate(parts)
        ]
    return [*(m for part in parts for m in part), *rest]


def _parts(line: Sequence[Moment]) -> tuple[list[list[Moment]], list[Moment]]:
    """The parts of an accumulated batch, each a forward, a loss and a backward; and what comes behind."""
    phases = [list(moments) for _, moments in itertools.groupby(line, key=lambda m: m.phase)]
    parts: list[list[Moment]] = []
    rest: list[Moment] = []
    for phase in phases:
        if phase[0].phase == "forward":
            parts.append([])
        behind = rest or (parts and parts[-1] and parts[-1][-1].phase == "backward")
        (
            rest if behind and phase[0].phase not in ("forward", "backward") else parts[-1] if parts else rest
        ).extend(phase)
        if phase[0].phase == "forward" and rest:
            parts[-1] = rest + parts[-1]
            rest = []
    return parts, rest


def _kept(issued: Issued, part: int, parts: int) -> bool:
    """Whether a collective of FSDP's is made in this part when parameters are gathered in the first and gradients are reduced
    in the last.
    """
    return part == (0 if issued.entry.kind == "all_gather" else parts - 1)
