"""The search itself: candidates, bounds, one trace a class, prices, and the dry runs of the best."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence

from parallelizer.child.children import Children, WorldError
from parallelizer.compiler.observe.equal_layers import SHORT, Run, longest_run, shortened_copy
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError, has_errors
from parallelizer.language.plan import EXPERT, Mesh
from parallelizer.language.styles import STYLES
from parallelizer.propose.search.bounds import (
    at_least,
    best_rate,
    flops_of_batch,
    memory_bound,
    state_bytes,
    time_bound,
)
from parallelizer.propose.search.candidate import NO_CHECKPOINT, Candidate
from parallelizer.propose.search.class_trace import ClassTrace, class_trace, rows_to_trace
from parallelizer.propose.search.estimate import Estimates
from parallelizer.propose.search.found import SearchResult
from parallelizer.propose.search.preset import preset_text
from parallelizer.propose.search.setups import (
    STREAM,
    blocks_of,
    checkpoint_modes,
    class_setup,
    expert_modules,
    shared_experts,
)
from parallelizer.propose.search.space import CandidateCount, SpaceFacts, candidates
from parallelizer.propose.search.task import SearchTask
from parallelizer.propose.search.truth import NotTraced, effort, reason, trace_whole
from parallelizer.simulate.record.trace import record
from parallelizer.styles.application import Program

SIDE_BY_SIDE = 2
"""Classes that are traced at a time."""

SURE = 1.1
"""An estimated peak above the limit by so much is taken not to fit. Below it a dry run decides."""

SLOWER = 1.3
"""A pipeline whose slowest stage alone takes so many times as long as the best candidate is not replayed."""

NEAR = 1.03
"""Estimates of candidates that differ in recomputation or in cp alone err alike, up to this factor."""

EFFORT = 420
"""Layers that the dry runs of the best candidates may step through in all; the first two are made in any case."""


Tell = Callable[[str], None]


class Search:
    """One search. `run` may be interrupted: `found` has what is known then. Traces of classes are kept for another search of the
    same model, on other GPUs or another number of them.
    """

    def __init__(self, base: Setup, tell: Tell) -> None:
        self.base, self.tell = base, tell
        self.model = base.build_model()
        program = self._on_two_ranks()
        self.run_of_layers: Run | None = longest_run(program, self.model, SHORT)
        self.blocks = blocks_of(program)
        self.experts, self.expert_modules = shared_experts(program, self.model), expert_modules(program)
        self.modes = checkpoint_modes(program, self.model)
        self.short = (
            copy.deepcopy(self.model)
            if self.run_of_layers is None
            else shortened_copy(self.model, self.run_of_layers)
        )
        self.states = state_bytes(self.model)
        self.sizes = sorted({size for p in self.model.parameters() for size in p.shape})
        self.traces: dict[Candidate, ClassTrace] = {}
        self.refused: dict[Candidate, str] = {}
        self.found = SearchResult()

    def _on_two_ranks(self) -> Program:
        """The plan compiled for two ranks, which share out the experts, if the plan has that and their number is even."""
        shares = any(use.style == "experts" for rule in self.base.plan.rules for use in rule.uses)

        def compiled(ep: int) -> Program:
            workload = dataclasses.replace(self.base.workload, batch_size=2, accumulate=1)
            mesh = Mesh({"dp_shard": 2, EXPERT: ep})
            return dataclasses.replace(self.base, mesh=mesh, workload=workload).compile(self.model)

        if shares:
            with contextlib.suppress(PlanError):
                return compiled(2)
        return compiled(1)

    def facts(self, task: SearchTask) -> SpaceFacts:
        """What the space depends on."""
        styles = {use.style for rule in self.base.plan.rules for use in rule.uses}
        axes = {STYLES[name].axis for name in styles if name in STYLES}
        stream = self.base.plan.layouts.get(STREAM)
        return SpaceFacts(
            task.gpus,
            self.base.workload.batch_size,
            self.base.workload.seq_len,
            task.machine.per_node,
            self.run_of_layers.count if self.run_of_layers else 0,
            "stage" in styles and self.run_of_layers is not None,
            "context-parallel" in styles,
            "tp" in axes,
            stream is not None and stream.kind == "shard",
            self.experts,
            self.modes,
        )

    def preset(self, task: SearchTask, candidate: Candidate, said: Sequence[str] = ()) -> str:
        """The preset file of a candidate, with comments."""
        return preset_text(candidate, task.given, self.blocks, self.run_of_layers, said)

    def run(self, task: SearchTask) -> SearchResult:
        """Search. After Ctrl-C `found` is not complete."""
        self.found = SearchResult()
        try:
            self._run(task)
        except KeyboardInterrupt:
            self.found.complete = False
        self.found.sort()
        return self.found

    def _run(self, task: SearchTask) -> None:
        found, counted = self.found, CandidateCount()
        every = list(candidates(self.facts(task), task.within, counted))
        found.total, found.excluded = counted.total, counted.excluded
        kept = [c for c in every if memory_bound(c, self.states) <= task.memory]
        found.pruned["their parameters and gradients alone do not fit"] = len(every) - len(kept)
        if not kept:
            return
        estimates = Estimates(task.machine, self.traces)
        for rest in (
            [c for c in kept if c.cp == 1 and c.checkpoint == NO_CHECKPOINT],
            [c for c in kept if c.cp == 1 and c.checkpoint != NO_CHECKPOINT],
            [c for c in kept if c.cp > 1 and c.checkpoint == NO_CHECKPOINT],
            [c for c in kept if c.cp > 1 and c.checkpoint != NO_CHECKPOINT],
        ):
            left = self._worth_it(rest, estimates, task)
            self._trace_classes(left)
            self._price(self._without_refused(left), estimates, task)
        found.sort()
        self._trace_best(task)

    def _worth_it(self, some: Sequence[Candidate], estimates: Estimates, task: SearchTask) -> list[Candidate]:
        """Without those that take longer than the best even if nothing is computed twice, and no sequence is split."""
        best = self._best(task)
        least = self._least(task)
        left = []
        for one in some:
            if best < least(one):
                self.found.pruned[
                    "slower than the best even at the highest rate that the device reaches"
                ] += 1
                continue
            bound = at_least(one)
            if bound != one and bound.trace_class in self.traces and best < float("inf"):
                price = estimates.of(bound, NEAR * best)
                if price is None or price.seconds > NEAR * best:
                    self.found.pruned[
                        "slower than the best even without recomputation and split sequences"
                    ] += 1
                    continue
            left.append(one)
        return left

    def _least(self, task: SearchTask) -> Callable[[Candidate], float]:
        """The function that bounds the seconds of a candidate from below; it knows nothing before the first trace."""
        if not self.traces:
            return lambda _: 0.0
        key, traced = next(iter(self.traces.items()))
        flops = flops_of_batch(traced, key, self.base.workload.batch_size)
        float8 = any(use.style == "float8" for rule in self.base.plan.rules for use in rule.uses)
        rate = best_rate(task.machine, float8=float8)
        return lambda one: time_bound(one, flops, rate)

    def _best(self, task: SearchTask) -> float:
        """The seconds of the best candidate that surely fits."""
        return min(
            (e.seconds for e in self.found.priced if SURE * e.peak <= task.memory), default=float("inf")
        )

    # Classes

    def _trace_classes(self, kept: Sequence[Candidate]) -> None:
        keys = {c.trace_class for c in kept}
        # A share of the layers is checkpointed: the others are as in the class without.
        keys |= {dataclasses.replace(k, checkpoint=NO_CHECKPOINT) for k in keys}
        keys -= {*self.traces, *self.refused}
        waiting = sorted(keys)
        done = 0
        while waiting:
            now, waiting = waiting[:SIDE_BY_SIDE], waiting[SIDE_BY_SIDE:]
            self.tell(f"tracing one layer of {done + len(now)} of {done + len(now) + len(waiting)} classes")
            calls, recorded = [], []
            for key in now:
                rows = rows_to_trace(self.base.workload.seq_len, key.cp, self.sizes)
                setup = class_setup(self.base, key, rows, self.blocks)
                try:
                    program = setup.compile(self.short)
                    if has_errors(program.diagnostics):
                        raise PlanError(program.diagnostics)
                except PlanError as error:
                    self.refused[key] = reason(error.diagnostics)
                    continue
                calls.append((record, program, self.short, setup.recipe(), 0))
                recorded.append((key, rows))
            with Children(calls) as children:
                try:
                    answers = children.results()
                except (PlanError, WorldError) as error:
                    diagnostics = error.diagnostics if isinstance(error, PlanError) else ()
                    for key, _ in recorded:
                        self.refused[key] = reason(diagnostics)
                    answers = []
            for (key, rows), answer in zip(recorded, answers, strict=bool(answers)):
                tokens = rows * self.base.workload.seq_len // key.cp
                self.traces[key] = class_trace(
                    answer, self.model, self.run_of_layers, rows, tokens, 2 * key.cp
                )
            done += len(now)
        self.found.classes = len(self.traces)

    def _without_refused(self, kept: Sequence[Candidate]) -> list[Candidate]:
        fine = []
        for one in kept:
            why = self.refused.get(one.trace_class)
            if why is None:
                fine.append(one)
            else:
                self.found.excluded[why] += 1
        return fine

    # Prices

    def _price(self, kept: Sequence[Candidate], estimates: Estimates, task: SearchTask) -> None:
        found, best = self.found, self._best(task)
        for at, one in enumerate(kept):
            if at % 200 == 0:
                self.tell(f"priced {len(found.priced):,} of {found.total:,} candidates")
            price = estimates.of(one, SLOWER * best)
            if price is None:
                found.pruned["their slowest stage alone takes longer than the best"] += 1
                continue
            found.priced.append(price)
            if SURE * price.peak <= task.memory:
                best = min(best, price.seconds)

    # Truth

    def _trace_best(self, task: SearchTask) -> None:
        spent = 0
        near = [e for e in self.found.priced if e.peak <= SURE * task.memory]
        if not near:  # what comes nearest says by how much nothing fits
            near = sorted(self.found.priced, key=lambda e: (e.peak, e.candidate))[:2]
        for price in near:
            made = len(self.found.results) + len(self.found.too_large)
            if len(self.found.results) >= task.traced or made >= 2 * task.traced:
                break
            cost = effort(price.candidate, self.run_of_layers)
            if len(self.found.results) >= 2 and spent + cost > EFFORT:
                continue
            self.tell(f"dry run {made + 1}: {price.candidate.words()}")
            truth = trace_whole(task, self.model, price.candidate, self.preset(task, price.candidate))
            spent += cost
            if isinstance(truth, NotTraced):
                self.found.failed.append(truth)
            elif truth.peak <= task.memory:
                self.found.results.append(truth)
            else:
                self.found.too_large.append(truth)
