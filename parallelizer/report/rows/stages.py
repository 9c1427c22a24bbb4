"""The rows of the table of pipeline stages: what each holds, and how long its rank waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from parallelizer.language.pipeline.replay import Replay, replay
from parallelizer.report.rows.paths import shown_paths
from parallelizer.styles.application import Program


@dataclass(frozen=True)
class StageRow:
    """A stage: its rank on `pp`, its modules, its parameters (copies of shared ones included), the modules whose outputs it
    receives, and the most microbatches of which it holds activations at once.
    """

    stage: int
    rank: int
    modules: tuple[str, ...]
    parameters: int
    receives: tuple[str, ...]
    live: int

    def as_json(self) -> dict[str, Any]:
        """One entry of the documented form."""
        return {
            "stage": self.stage,
            "pp_rank": self.rank,
            "modules": list(self.modules),
            "parameters": self.parameters,
            "receives": list(self.receives),
            "live_microbatches": self.live,
        }

    @property
    def paths(self) -> list[str]:
        """The modules, folded."""
        return shown_paths(self.modules)


def stage_rows(program: Program, model: nn.Module) -> list[StageRow]:
    """A row for each stage, in order. `model` is as it was compiled: unsharded."""
    stages = program.require_stages()
    modules = [path for path, _ in model.named_modules()]
    parameters = [0] * len(stages)
    for name, param in model.named_parameters():
        for index in stages.copies(name):
            parameters[index] += param.numel()
    ranks = {index: rank for rank in range(stages.ranks) for index in stages.on_rank(rank)}
    return [
        StageRow(
            index,
            ranks[index],
            tuple(path for path in modules if path in stage.units),
            parameters[index],
            tuple(map(str, stage.receives)),
            _live(program, ranks[index], index),
        )
        for index, stage in enumerate(stages.stages)
    ]


def bubble(program: Program) -> Replay:
    """The schedule with actions of equal length: a forward takes one unit, a whole backward two."""
    return replay(program.require_stages().order)


def _live(program: Program, rank: int, stage: int) -> int:
    """The most microbatches between their forward and the end of their backward on a stage."""
    live = most = 0
    for action in program.require_stages().order[rank]:
        if action.stage == stage:
            live += {"F": 1, "I": 0}.get(action.kind, -1)
            most = max(most, live)
    return most


def summary(program: Program) -> str:
    """What is said of the whole pipeline."""
    pipeline = program.require_stages().pipeline
    waiting = f"ranks wait {100 * bubble(program).bubble:.1f} % of the time if stages take equal time"
    return f"{pipeline.csv or pipeline.schedule}, {pipeline.microbatches} microbatches; {waiting}"


def pipeline_document(program: Program) -> dict[str, Any]:
    """The schedule, and the share of the ranks' time in which they wait, as scripts read it."""
    pipeline = program.require_stages().pipeline
    return {
        "schedule": None if pipeline.csv else pipeline.schedule,
        "order_file": pipeline.csv,
        "microbatches": pipeline.microbatches,
        "stages_per_rank": pipeline.stages_per_rank,
        "bubble": bubble(program).bubble,
    }
