"""The classes of candidates with equal operators: of each, a short model is dry-run once."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from torch import nn

from parallelizer.child.children import Children, WorldError
from parallelizer.compiler.observe.equal_layers import SHORT, Run, longest_run, shortened_copy
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError, has_errors
from parallelizer.language.plan import EXPERT, Mesh
from parallelizer.propose.search.candidate import NO_CHECKPOINT, Candidate
from parallelizer.propose.search.class_trace import ClassTrace, class_trace, rows_to_trace
from parallelizer.propose.search.setups import (
    blocks_of,
    checkpoint_modes,
    class_setup,
    expert_modules,
    shared_experts,
)
from parallelizer.propose.search.truth import reason
from parallelizer.simulate.record.trace import Recipe, record
from parallelizer.simulate.trace_failed import broken_off
from parallelizer.styles.application import Program

SIDE_BY_SIDE = 2
"""Classes that are traced at a time."""

Tell = Callable[[str], None]


class TracedClasses:
    """`traces` has what was traced, by `Candidate.trace_class`, and `refused` the reasons of those that cannot be."""

    def __init__(self, base: Setup, tell: Tell) -> None:
        self.base, self.tell = base, tell
        self.model = base.build_model()
        program = _on_two_ranks(base, self.model)
        self.run: Run | None = longest_run(program, self.model, SHORT)
        self.blocks = blocks_of(program)
        self.experts = shared_experts(program, self.model)
        self.modes = checkpoint_modes(program, self.model)
        self.short = copy.deepcopy(self.model) if self.run is None else shortened_copy(self.model, self.run)
        self.expert_modules = expert_modules(program)
        self.sizes = sorted({size for p in self.model.parameters() for size in p.shape})
        self.traces: dict[Candidate, ClassTrace] = {}
        self.refused: dict[Candidate, str] = {}

    def trace(self, keys: Iterable[Candidate]) -> None:
        """Trace the classes that are not known yet."""
        waiting = sorted({*keys} - {*self.traces, *self.refused})
        while waiting:
            # What tp and ep cannot do, they cannot do with less in memory or on shorter sequences either.
            waiting = [key for key in waiting if not self._refuses_like(key)]
            now, waiting = waiting[:SIDE_BY_SIDE], waiting[SIDE_BY_SIDE:]
            if now:
                self.tell(f"tracing one layer of {len(self.traces) + len(now)} classes")
                self._trace(now)

    def _refuses_like(self, key: Candidate) -> bool:
        """Whether the same class without recomputation and with whole sequences was refused; then this one is too."""
        like = dataclasses.replace(key, cp=1, method="", checkpoint=NO_CHECKPOINT).trace_class
        if like == key or like not in self.refused:
            return False
        self.refused[key] = self.refused[like]
        return True

    def _trace(self, keys: Iterable[Candidate]) -> None:
        calls, traced = [], []
        for key in keys:
            rows = rows_to_trace(self.base.workload.seq_len, key.cp, self.sizes)
            setup = class_setup(self.base, key, rows, self.blocks)
            try:
                program = setup.compile(self.short)
                if has_errors(program.diagnostics):
                    raise PlanError(program.diagnostics)
            except PlanError as error:
                self.refused[key] = reason(error.diagnostics)
                continue
            calls.append((_traced, program, self.short, setup.recipe(), self, key, rows))
            traced.append(key)
        with ExitStack() as stack:
            # Each by itself: one that fails says nothing of the others.
            running = [stack.enter_context(Children([call])) for call in calls]
            for key, children in zip(traced, running, strict=True):
                try:
                    [self.traces[key]] = children.results()
                except PlanError as error:
                    self.refused[key] = reason(error.diagnostics)
                except WorldError as error:
                    self.refused[key] = reason(broken_off(error).diagnostics)


def _traced(
    program: Program, short: nn.Module, recipe: Recipe, classes: TracedClasses, key: Candidate, rows: int
) -> ClassTrace:
    """In a child, which sends its summary to the parent."""
    tokens = rows * recipe.workload.seq_len // key.cp
    made = record(program, short, recipe, 0)
    return class_trace(made, classes.model, classes.run, rows, tokens, 2 * key.cp, classes.expert_modules)


def _on_two_ranks(base: Setup, model: nn.Module) -> Program:
    """The plan compiled for two ranks, which share out the experts, if the plan has that and their number is even."""
    shares = any(use.style == "experts" for rule in base.plan.rules for use in rule.uses)

    def compiled(ep: int) -> Program:
        workload = dataclasses.replace(base.workload, batch_size=2, accumulate=1)
        mesh = Mesh({"dp_shard": 2, EXPERT: ep})
        return dataclasses.replace(base, mesh=mesh, workload=workload).compile(model)

    if shares:
        with contextlib.suppress(PlanError):
            return compiled(2)
    return compiled(1)
