"""What a proof runs: a model with its plan, loss, optimizer and batches, small enough for this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from parallelizer.compiler.compile import compile as compile_plan
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import Mesh, Option, Plan, Rule, StyleDefaults
from parallelizer.language.workload import Workload
from parallelizer.proof.scene import Scene
from parallelizer.runtime.initialize import Initializer
from parallelizer.runtime.step import Loss
from parallelizer.styles.application import Program

LOUD = 4.0
"""Values of several sizes take more of the branches that a forward has."""


def _fills_itself(model: nn.Module) -> None:
    """Nothing else needs to build the model."""


@dataclass(frozen=True)
class Subject:
    """A model under a plan on a mesh, and how it is trained.

    `build` returns the model, on meta or with values of its own, the same on every call. `batch` gives the
    whole batch of the step that a seed stands for: `rows` sequences of `seq_len` tokens, which `accumulate`
    parts of every rank share out. Before the second step the parameters and the batch's numbers are multiplied by `loud`.
    `whole(model)` is what builds a model that only its constructor can fill. The ranks compute on `device`, cpu or cuda; the
    unsharded run always on the CPU. Behind the steps the `scenes` are run.
    """

    plan: Plan
    mesh: Mesh
    build: Callable[[], nn.Module]
    loss: Loss
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[int], dict[str, torch.Tensor]]
    rows: int
    seq_len: int
    accumulate: int = 1
    clip: float | None = None
    initializer: Initializer | None = None
    whole: Callable[[nn.Module], Callable[[], nn.Module] | None] = _fills_itself
    defaults: Mapping[str, StyleDefaults] = field(default_factory=dict)
    workload: Workload | None = None
    redistribute: str = "greedy"
    loud: float = LOUD
    pipeline: Pipeline | None = None
    device: str = "cpu"
    scenes: tuple[Scene, ...] = ()

    def compile(self, model: nn.Module, *, force: bool = False) -> Program:
        """Compile the plan for the model. Raises PlanError; with `force` only where no program can be
        made.
        """
        return compile_plan(
            _emulated(self.plan),
            model,
            self.mesh,
            workload=self.workload,
            defaults=self.defaults,
            redistribute=self.redistribute,
            pipeline=self.pipeline,
            force=force,
        )

    @property
    def tokens(self) -> int:
        """Tokens in the whole batch."""
        return self.rows * self.seq_len


def _emulated(plan: Plan) -> Plan:
    """The plan with float8 emulated: small models have sizes that kernels for float8 do not."""
    return dataclasses.replace(plan, rules=tuple(map(_emulated_rule, plan.rules)))


def _emulated_rule(rule: Rule) -> Rule:
    uses = (
        dataclasses.replace(use, options={**use.options, "emulate": Option(True, use.span)})
        if use.style == "float8"
        else use
        for use in rule.uses
    )
    return dataclasses.replace(rule, uses=tuple(uses))
