"""The classes of candidates with equal operators: of each, a short model is dry-run once."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from torch import nn

from parallelizer.child.children import Children, WorldError, first_done
from parallelizer.compiler.observe.equal_layers import SHORT, Run, longest_run, shortened_copy
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError, has_errors
from parallelizer.language.plan import EXPERT, Mesh
from parallelizer.propose.search.candidate import FULL, NO_CHECKPOINT, SPLIT, Candidate
from parallelizer.propose.search.class_trace import ClassTrace, class_trace, rows_to_trace
from parallelizer.propose.search.other_ep import NotAlike, between, with_other_ep
from parallelizer.propose.search.recomputed import Recomputation, recomputation, recomputed
from parallelizer.propose.search.setups import (
    STREAM,
    blocks_of,
    checkpoint_modes,
    class_setup,
    expert_modules,
    shared_experts,
)
from parallelizer.propose.search.truth import reason
from parallelizer.simulate.record.trace import record
from parallelizer.simulate.trace_failed import broken_off
from parallelizer.styles.application import Program

SIDE_BY_SIDE = 2
"""Classes that are traced at a time."""

Tell = Callable[[str], None]


class TracedClasses:
    """`traces` has what is known of classes, by `Candidate.trace_class`, and `refused` the reasons of those that cannot be
    traced. `count` is the number that was traced.
    """

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
        self.shapes = {tuple(p.shape) for p in self.model.parameters()}
        self.traces: dict[Candidate, ClassTrace] = {}
        self.refused: dict[Candidate, str] = {}
        self.modes_seen: dict[object, Recomputation] = {}
        self.count = 0
        self.likely: deque[Candidate] = deque()
        self.running: dict[Children, Candidate] = {}
        self.ahead: dict[Candidate, ClassTrace | str] = {}
        """What came of classes that nobody has asked for: it must not depend on the time what a search knows."""

    def trace(self, keys: Iterable[Candidate], likely: Iterable[Candidate] = ()) -> None:
        """Know the classes. Of those that recompute one of each kind is traced: it shows what its mode does to the others. Where
        a core has nothing to do, those that are `likely` to be asked for next are traced ahead, until `stop`.
        """
        self.likely = deque(likely)
        wanted = sorted({*keys} - {*self.traces, *self.refused}, key=lambda key: (key.checkpoint, key))
        if self.run is None:
            self._trace(wanted)
            return
        recomputing = [key for key in wanted if key.checkpoint != NO_CHECKPOINT]
        first: dict[object, Candidate] = {}
        for key in recomputing:
            if _alike(key) not in self.modes_seen and not self._refuses_like(key):
                first.setdefault(_alike(key), key)
        self._trace([*(key.plain_class for key in wanted), *first.values()])
        for key in recomputing:  # `full` before `selective`, which keeps more
            if self._refuses_like(key):
                self.traces.pop(key, None)  # traced beside the class without recomputation
                continue
            mode = self.modes_seen.get(_alike(key))
            if mode is not None:
                self.traces[key] = recomputed(self.traces[key.plain_class], mode, self._split(key))
                continue
            self._trace([key])  # nothing to do unless the first of its kind was refused
            if key in self.traces:
                full = self.modes_seen.get(_alike(dataclasses.replace(key, checkpoint=FULL)))
                self.modes_seen[_alike(key)] = recomputation(
                    self.traces[key.plain_class], self.traces[key], self._split(key), full
                )

    def _split(self, key: Candidate) -> int:
        """The parts that the stream of a rank's tokens is split into."""
        stream = self.base.plan.layouts.get(STREAM)
        return key.tp if key.stream == SPLIT and stream is not None and stream.kind == "shard" else 1

    def _trace(self, keys: Iterable[Candidate]) -> None:
        """Know classes that are not known yet. Those that lie between two others in ep are not traced unless these two differ in
        more than sizes.
        """
        unknown = {*keys} - {*self.traces, *self.refused}
        inner = between(unknown, self.traces)
        self._trace_each(unknown - inner.keys())
        for key, (fewer, more) in inner.items():
            if fewer in self.traces and more in self.traces:
                with contextlib.suppress(NotAlike):
                    self.traces[key] = with_other_ep(
                        self.traces[fewer], self.traces[more], (fewer.ep, more.ep), key.ep
                    )
        self._trace_each(inner.keys() - self.traces.keys())

    def _trace_each(self, keys: Iterable[Candidate]) -> None:
        """Trace classes, SIDE_BY_SIDE at a time, those without recomputation first."""
        waiting = deque(sorted(keys, key=lambda key: (key.checkpoint != NO_CHECKPOINT, key)))
        wanted = {*waiting}
        while wanted:
            for key in wanted & self.ahead.keys():
                self._know(key, self.ahead.pop(key))
            wanted -= self.traces.keys() | self.refused.keys()
            while waiting and len(wanted & {*self.running.values()}) < SIDE_BY_SIDE:
                key = waiting.popleft()
                if key in wanted and key not in self.running.values() and not self._refuses_like(key):
                    self._start(key)
            wanted -= self.refused.keys()
            while not waiting and self.likely and len(self.running) < SIDE_BY_SIDE:
                self._start_ahead(self.likely.popleft())
            if wanted:
                done = first_done(list(self.running))
                self.ahead[self.running.pop(done)] = _outcome(done)

    def _start(self, key: Candidate) -> None:
        self.running[Children([(_traced, self, key)])] = key

    def _start_ahead(self, key: Candidate) -> None:
        """Start a class that is likely to be asked for, unless it is on its way, or will follow from others."""
        there = {*self.traces, *self.ahead, *self.running.values()}
        if self.run is not None and _alike(key) in {*self.modes_seen, *map(_alike, there)}:
            key = key.plain_class
        if key not in there and not self._refuses_like(key):
            self._start(key)

    def stop(self) -> None:
        """End what is traced ahead."""
        while self.running:
            self.running.popitem()[0].__exit__()

    def _refuses_like(self, key: Candidate) -> bool:
        """Whether the same class without recomputation, or with whole sequences too, was refused; then this one is too: what tp
        and ep cannot do, they cannot do with less in memory or on shorter sequences either.
        """
        plain = key.plain_class
        for like in (plain, dataclasses.replace(plain, cp=1, method="").trace_class):
            if like != key and like in self.refused:
                self.refused[key] = self.refused[like]
                return True
        return False

    def _know(self, key: Candidate, outcome: ClassTrace | str) -> None:
        """Take what came of a class. One that fails says nothing of the others."""
        self.count += 1
        self.tell(f"traced one layer of {self.count} classes")
        if isinstance(outcome, str):
            self.refused[key] = outcome
        else:
            self.traces[key] = outcome


def _outcome(children: Children) -> ClassTrace | str:
    """The class, or the reason why it cannot be traced."""
    try:
        [traced] = children.results()
    except PlanError as error:
        return reason(error.diagnostics)
    except WorldError as error:
        return reason(broken_off(error).diagnostics)
    return cast(ClassTrace, traced)


def _alike(key: Candidate) -> object:
    """What the classes have in common in which a mode does the same."""
    return key.checkpoint, key.tp > 1, key.ep > 1, key.stream, key.precision


def _traced(classes: TracedClasses, key: Candidate) -> ClassTrace:
    """In a child, which sends its summary to the parent. Raises PlanError."""
    rows = rows_to_trace(classes.base.workload.seq_len, key.cp, classes.shapes)
    setup = class_setup(classes.base, key, rows, classes.blocks)
    program, recipe = setup.compile(classes.short), setup.recipe()
    if has_errors(program.diagnostics):
        raise PlanError(program.diagnostics)
    tokens = rows * recipe.workload.seq_len // key.cp
    made = record(program, classes.short, recipe, 0, warm=False)
    parts = sorted({1, key.tp, key.ep, key.tp * key.ep})
    return class_trace(
        made, classes.model, classes.run, rows, tokens, key.shards, classes.expert_modules, parts
    )


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
