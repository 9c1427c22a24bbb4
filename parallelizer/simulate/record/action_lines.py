"""The time lines of a pipeline's actions, for pricing: what a rank computes for one microbatch on one stage.

As a recording stands for a whole step (`pipeline_step.py`), three microbatches of an action stand for all: the first, which
gathers, the second, and the last, which reduces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from parallelizer.language.pipeline.actions import Action, ActionKind, Order
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.operators import Moment
from parallelizer.simulate.record.pipeline_step import (
    FEW,
    Marks,
    occurrences,
    pieces_of,
    stage_kinds,
    stand_in,
)
from parallelizer.simulate.record.time_line import TimeLine
from parallelizer.styles.application import Program

Line = tuple[Moment, ...]


@dataclass(frozen=True)
class RankLines:
    """The lines of one rank on `pp`. `actions` are those of a part, kind and stage, by the microbatches that were recorded, and
    `tail` is what the rank does behind its last action: it clips, and runs the optimizer. `times` says how many actions of a step
    each of the recorded ones stands for.
    """

    actions: Mapping[tuple[int, ActionKind, int], tuple[Line, ...]]
    tail: Line
    times: Mapping[tuple[int, ActionKind, int], tuple[int, ...]] = field(default_factory=dict)

    def counted(self) -> Iterator[tuple[Moment, int]]:
        """The moments of a whole step, each with how often it comes."""
        for key, lines in self.actions.items():
            for line, times in zip(lines, self.times[key], strict=True):
                yield from ((moment, times) for moment in line)
        yield from ((moment, 1) for moment in self.tail)

    @property
    def stages(self) -> frozenset[int]:
        """The stages of the rank."""
        return frozenset(stage for _, _, stage in self.actions)


@dataclass(frozen=True)
class StandIn:
    """The stage whose lines stand for those of a stage, which takes `factor` times as long."""

    stage: int
    factor: float = 1.0


@dataclass(frozen=True)
class PipelineLines:
    """The lines of a whole pipeline. `order` has the actions of a part, of which a step has `parts`; `by_stage` are the lines of
    the rank of each traced stage, and `stand_ins` has an entry for each stage.
    """

    order: Order
    parts: int
    rank: int
    by_stage: Mapping[int, RankLines]
    stand_ins: tuple[StandIn, ...]


def rank_lines(
    line: TimeLine,
    entries: Sequence[Collective],
    marks: Marks,
    schedule: Sequence[Action],
    parts: int,
    few: int = FEW,
) -> RankLines:
    """The lines of a recorded rank, with the ledger's entries in their places. `schedule` are the actions of the rank in each of
    the `parts` of a step; `few` of a kind stand for all.
    """
    pieces = pieces_of([list(range(len(line.line)))], marks)
    known: dict[Moment, Moment] = {}

    def moments(places: Sequence[int]) -> Line:
        # Microbatches do the same: one object for what is equal keeps small what the process sends.
        return tuple(known.setdefault(m, m) for m in line.moments(entries, places))

    actions = {
        key: tuple(
            moments([place for piece in each if not isinstance(piece, tuple) for place in piece[0]])
            for each in those
        )
        for key, those in pieces.actions.items()
    }
    times = {key: [0] * len(those) for key, those in actions.items()}
    recorded = 1 + max(pieces.ends)
    for part in range(parts):
        for action, (at, count) in zip(schedule, occurrences(schedule), strict=True):
            those = times[stand_in(part, parts, recorded), action.kind, action.stage]
            those[stand_in(at, count, len(those), few)] += 1
    return RankLines(
        actions, moments(pieces.ends[max(pieces.ends)][0]), {key: tuple(n) for key, n in times.items()}
    )


def pipeline_lines(
    program: Program, model: nn.Module, parts: int, rank: int, ranks: Sequence[RankLines]
) -> PipelineLines | None:
    """The lines of all stages by those of the traced ranks; None where the first or the last stage was not traced. `rank` is
    the place on `pp` of the rank that is asked for.
    """
    stages = program.require_stages()
    by_stage = {stage: lines for lines in ranks for stage in lines.stages}
    if not {0, len(stages) - 1} <= set(by_stage):
        return None
    kinds = stage_kinds(program, model)
    sizes = [0] * len(stages)
    for name, param in model.named_parameters():
        for index in stages.copies(name):
            sizes[index] += param.numel()

    def stands_for(stage: int) -> StandIn:
        if stage in by_stage:
            return StandIn(stage)
        alike = next((other for other in by_stage if kinds[other] == kinds[stage]), None)
        if alike is not None:
            return StandIn(alike)
        # Stages in the middle are made of equal layers: some have one more.
        inner = [other for other in by_stage if 0 < other < len(stages) - 1] or [0]
        nearest = min(inner, key=lambda other: abs(sizes[other] - sizes[stage]))
        return StandIn(nearest, sizes[stage] / sizes[nearest] if sizes[nearest] else 1.0)

    return PipelineLines(stages.order, parts, rank, by_stage, tuple(map(stands_for, range(len(stages)))))
