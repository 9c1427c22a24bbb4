"""The search itself: candidates, bounds, one trace a class, prices, and the dry runs of the best."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from parallelizer.child.shared_calls import SharedCalls
from parallelizer.configuration.setup import Setup
from parallelizer.language.plan import StyleDefaults
from parallelizer.language.styles import STYLES
from parallelizer.propose.search.bounds import (
    best_rate,
    flops_of_batch,
    memory_bound,
    no_slower,
    state_bytes,
    time_bound,
    with_whole_sequences,
)
from parallelizer.propose.search.candidate import FULL, NO_CHECKPOINT, Candidate
from parallelizer.propose.search.classes import SIDE_BY_SIDE, Tell, TracedClasses
from parallelizer.propose.search.estimate import SURE, Estimate, Estimates
from parallelizer.propose.search.found import STATES, SearchResult
from parallelizer.propose.search.preset import preset_text
from parallelizer.propose.search.refine import refined
from parallelizer.propose.search.setups import STREAM
from parallelizer.propose.search.space import CandidateCount, SpaceFacts, candidates
from parallelizer.propose.search.task import SearchTask
from parallelizer.propose.search.truth import NotTraced, TracedWhole, effort, tracing_whole

SLOWER = 1.3
"""Candidates whose least seconds by estimate are so many times those of the last that may be dry-run are not priced. The least is
an estimate too, no bound of a dry run: `python -m benchmarks.search --only exhaustive` compares both.
"""

NEAR = 1.03
"""Estimates of candidates that differ in recomputation or in cp alone are taken to err alike, up to this factor."""

ALIKE, ALIKE_BUT_CP, ALIKE_BUT_METHOD = 1.02, 1.01, 1.005
"""Estimated peaks of like candidates are taken to err alike, up to this factor; of those that differ in the ranks of cp alone,
and have as many tokens; and of those that differ in the method of context parallelism alone.
"""

CONTEXT = "context-parallel"

SIMPLER = "slower than the best, by the estimate with less recomputation, cp or tp"
"""A reason of `pruned`."""

TEN = 10
"""So many of the best by estimate are refined."""

SMALL = 3
"""Candidates that hold less than the best ten, and are dry-run for the page."""

EFFORT = 120
"""Layers that the dry runs of the best candidates may step through in all, beyond those that are asked for."""


class Search:
    """One search. `run` may be interrupted: `found` has what is known then. Traces of classes are kept for another search of the
    same model, on other GPUs or another number of them.
    """

    def __init__(self, base: Setup, tell: Tell) -> None:
        self.base, self.tell = base, tell
        self.classes = TracedClasses(base, tell)
        self.model, self.run_of_layers = self.classes.model, self.classes.run
        self.states = state_bytes(self.model)
        self.found = SearchResult()
        self.refused: dict[tuple[object, ...], str] = {}
        """By kind and class, why one was not traced whole."""

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
            "stage" in styles,
            CONTEXT in styles,
            "tp" in axes,
            stream is not None and stream.kind == "shard",
            self.classes.experts,
            self.classes.modes,
            tuple(task.given.get("pipeline", {}).get("balance", ())),
            self._method(),
        )

    def _method(self) -> str:
        """The method of context parallelism without an option of the search; empty where rules differ in it."""
        given = self.base.defaults.get(CONTEXT, StyleDefaults()).options.get("method")
        usual = STYLES[CONTEXT].defaults["method"] if given is None else given.value
        found = {
            str(usual if (option := use.options.get("method")) is None else option.value)
            for rule in self.base.plan.rules
            for use in rule.uses
            if use.style == CONTEXT
        }
        return found.pop() if len(found) == 1 else ""

    def preset(self, task: SearchTask, candidate: Candidate, said: Sequence[str] = ()) -> str:
        """The preset file of a candidate, with comments."""
        return preset_text(
            candidate, task.given, self.base.plan, self.classes.blocks, self.run_of_layers, said
        )

    def run(self, task: SearchTask) -> SearchResult:
        """Search. After Ctrl-C `found` is not complete."""
        self.found = SearchResult()
        try:
            self._run(task)
        except KeyboardInterrupt:
            self.found.complete = False
        finally:
            self.classes.stop()
        self.found.sort()
        return self.found

    def _run(self, task: SearchTask) -> None:
        found, counted = self.found, CandidateCount()
        every = list(candidates(self.facts(task), task.within, counted))
        found.total, found.excluded = counted.total, counted.excluded
        kept = [c for c in every if memory_bound(c, self.states) <= task.memory]
        found.pruned[STATES] = len(every) - len(kept)
        if not kept:
            found.states = min((memory_bound(c, self.states) for c in every), default=0)
            return
        estimates = Estimates(task.machine, self.classes.traces)
        plain = [c for c in kept if c.cp == 1 and c.checkpoint == NO_CHECKPOINT]
        sizes = sorted({c.tp for c in plain})
        rest: dict[int, dict[Candidate, list[Candidate]]] = {}
        for one in kept:
            if one.cp > 1 or one.checkpoint != NO_CHECKPOINT:
                rest.setdefault(one.cp, {}).setdefault(one.trace_class, []).append(one)
        of_cp = [rest[cp] for cp in sorted(rest)]
        for at in range(0, len(sizes), SIDE_BY_SIDE):
            some = [c for c in plain if c.tp in sizes[at : at + SIDE_BY_SIDE]]
            likely = [key for classes in of_cp[:1] for key in sorted(classes)[:SIDE_BY_SIDE]]
            self._take(self._worth_it(some, estimates, task), estimates, task, likely)
        for at, classes in enumerate(of_cp):  # those with less cp say more of others
            after = [min(later) for later in of_cp[at + 1 : at + 2]]
            self._take_classes(classes, after, estimates, task)
        found.sort()
        self._refine(estimates, task)
        found.sort()
        with SharedCalls() as shared:
            self._trace_best(task, shared)
            found.sort()
            self._trace_small(task, shared)

    def _take_classes(
        self,
        some: Mapping[Candidate, Sequence[Candidate]],
        after: Sequence[Candidate],
        estimates: Estimates,
        task: SearchTask,
    ) -> None:
        """Take the candidates of classes with as many ranks of cp. The classes in which the fastest may be come first: what is
        found there rules out others. `after` are classes that are likely to come next.
        """
        least = {key: min(map(self._least(estimates, task), those)) for key, those in some.items()}
        waiting = deque(sorted(some, key=lambda key: (least[key], key)))
        while waiting:
            now: list[Candidate] = []
            # Of classes that differ in recomputation alone, one is traced.
            while waiting and len({c.trace_class.plain_class for c in now}) < SIDE_BY_SIDE:
                key = waiting.popleft()
                if least[key] > self._limit(key, task):
                    self.found.pruned[SIMPLER] += len(some[key])
                else:
                    now += self._worth_it(some[key], estimates, task)
            next_ones = [key for key in waiting if least[key] <= self._limit(key, task)]
            self._take(now, estimates, task, [*next_ones[:SIDE_BY_SIDE], *after])

    def _limit(self, one: Candidate, task: SearchTask) -> float:
        """What the least seconds of a candidate may be at most. Estimates of recomputation err by a little; cp never makes a step
        faster.
        """
        return self._best(task) * (NEAR if one.cp == 1 else 1)

    def _worth_it(self, some: Sequence[Candidate], estimates: Estimates, task: SearchTask) -> list[Candidate]:
        """Without those that a bound says are slower than the best: if nothing is computed twice, no sequence is split, and fewer
        ranks share a product; and without those that only split sequences that fit whole. All have as many ranks of cp.
        """
        least, left = self._least(estimates, task), []
        limit = self._limit(some[0], task)
        for one in some:
            if least(one) > limit:
                self.found.pruned[SIMPLER] += 1
                continue
            whole = with_whole_sequences(one)
            if whole is not None and estimates.knows(whole):
                if SURE * estimates.peak(whole) <= task.memory:
                    self.found.pruned["cp is not needed: whole sequences fit"] += 1
                    continue
                if estimates.peak(whole, 1 / one.cp) > task.memory or (
                    # A rank has as many tokens of its part of a sequence as of whole ones.
                    estimates.peak(whole, one.rows / one.cp / whole.rows) > SURE * task.memory
                ):
                    self.found.pruned["too large: as many tokens of whole sequences do not fit"] += 1
                    continue
            left.append(one)
        return left

    def _least(self, estimates: Estimates, task: SearchTask) -> Callable[[Candidate], float]:
        """The least seconds of a candidate, by a bound or by the estimate of a simpler one; 0 before the first trace."""
        traces = self.classes.traces
        if not traces:
            return lambda _: 0.0
        key = min(traces)  # the first one depends on the time
        flops = flops_of_batch(traces[key], key, self.base.workload.batch_size)
        float8 = any(use.style == "float8" for rule in self.base.plan.rules for use in rule.uses)
        rate = best_rate(task.machine, float8=float8)

        def least(one: Candidate) -> float:
            whole = with_whole_sequences(
                one
            )  # takes no longer, and its class may have been left out for its floor
            floor = max(time_bound(one, flops, rate), estimates.floor(one))
            floor = floor if whole is None else max(floor, estimates.floor(whole))
            bound = next((b for b in no_slower(one) if estimates.knows(b)), None)
            if bound is None:
                return floor
            again = one.share if one.checkpoint == FULL and bound.checkpoint == NO_CHECKPOINT else 0.0
            return max(floor, estimates.least(bound, again))

        return least

    def _best(self, task: SearchTask) -> float:
        """The seconds of the best candidate that surely fits."""
        return min(
            (e.seconds for e in self.found.priced if SURE * e.peak <= task.memory), default=float("inf")
        )

    def _take(
        self,
        some: Sequence[Candidate],
        estimates: Estimates,
        task: SearchTask,
        likely: Sequence[Candidate] = (),
    ) -> None:
        """Trace the classes of candidates, and price those whose class can be traced. `likely` as in `TracedClasses.trace`."""
        keys = {c.trace_class for c in some}
        # Of a layer under a checkpoint, a share may be as in the class without.
        keys |= {replace(c.trace_class, checkpoint=NO_CHECKPOINT) for c in some if c.share < 1}
        self.classes.trace(keys, likely)
        self.found.classes = self.classes.count
        refused = self.classes.refused
        self.found.excluded.update(refused[c.trace_class] for c in some if c.trace_class in refused)
        self._price([c for c in some if estimates.knows(c)], estimates, task)

    # Prices

    def _price(self, kept: Sequence[Candidate], estimates: Estimates, task: SearchTask) -> None:
        """Price the candidates that may be among those that are dry-run: the others take longer than enough that fit."""
        found, wanted = self.found, 2 * task.traced
        fastest = heapq.nsmallest(wanted, (e.seconds for e in found.priced if SURE * e.peak <= task.memory))
        bounds = sorted((estimates.least(one), one) for one in kept)
        for at, (least, one) in enumerate(bounds):
            if at % 200 == 0:
                pruned = sum(found.pruned.values())
                self.tell(f"priced {len(found.priced):,} and pruned {pruned:,} of {found.total:,} candidates")
            if len(fastest) == wanted and least > SLOWER * fastest[-1]:
                found.pruned["slower than the best by estimate"] += len(bounds) - at
                return
            if one.pp > 1 and len(fastest) == wanted and least > fastest[-1]:
                found.pruned["slower than the best by estimate"] += 1
                continue
            price = estimates.of(one, task.memory)
            found.priced.append(price)
            if SURE * price.peak <= task.memory:
                bisect.insort(fastest, price.seconds)
                del fastest[wanted:]

    def _refine(self, estimates: Estimates, task: SearchTask) -> None:
        """Price what differs from the ten best in keys that are not tried everywhere, unless a limit names them: the share of the
        layers that is checkpointed, and of the fastest with tp or cp a whole stream and other methods.
        """
        best = [e.candidate.without_layers() for e in self.found.priced if e.peak <= SURE * task.memory][:TEN]
        facts, known = self.facts(task), {e.candidate.without_layers() for e in self.found.priced}
        more = refined(best, facts, task.within)
        new = [one for one in dict.fromkeys(more) if one not in known]
        self.found.total += len(new)
        self._take(new, estimates, task)

    # Truth

    def _trace_best(self, task: SearchTask, shared: SharedCalls) -> None:
        """Dry-run the best, the next while the last is on its way."""
        found, spent, started = self.found, 0, 0
        near = [e for e in found.priced if e.peak <= SURE * task.memory]
        estimated = {price.candidate: price.peak for price in near}
        if not near:  # what comes nearest says by how much nothing fits
            near = sorted(found.priced, key=lambda e: (e.peak, e.candidate))[:2]
        with _DryRuns(lambda truth: self._judge(truth, task)) as on_the_way:
            for price in near:
                while len(found.results) + len(on_the_way) >= task.traced and on_the_way:
                    on_the_way.finish()
                made = len(found.results) + len(found.too_large)
                if len(found.results) >= task.traced or made >= 2 * task.traced:
                    return
                if (price.candidate.kind, price.candidate.trace_class) in self.refused:
                    found.excluded[self.refused[price.candidate.kind, price.candidate.trace_class]] += 1
                    continue
                if price.peak > task.memory:  # a like candidate on its way may tell
                    on_the_way.finish_all()
                if scaled_peak(price, [*found.results, *found.too_large], estimated) > task.memory:
                    found.pruned["too large, as like candidates were by their dry runs"] += 1
                    continue
                cost = effort(price.candidate, self.run_of_layers)
                if spent + cost > EFFORT:
                    on_the_way.finish_all()
                    if len(found.results) >= task.asked:
                        found.cut_short = True
                        continue
                started, spent = started + 1, spent + cost
                self.tell(f"dry run {started}: {price.candidate.words()}")
                text = self.preset(task, price.candidate)
                on_the_way.start(
                    tracing_whole(task, self.model, price.candidate, text, check=True, shared=shared)
                )
            on_the_way.finish_all()

    def _trace_small(self, task: SearchTask, shared: SharedCalls) -> None:
        """For the page, dry-run some that hold less than all results, which no other beats in time and memory by estimate."""
        if not task.front or not self.found.results:
            return
        least = min(one.peak for one in self.found.results)
        known = {one.candidate for one in (*self.found.results, *self.found.too_large)}
        known |= {one.candidate for one in self.found.failed}
        edge: list[Estimate] = []
        for one in self.found.priced:  # by time
            if one.candidate not in known and one.peak < min(least, edge[-1].peak if edge else least):
                edge.append(one)
        count = min(SMALL, len(edge))
        chosen = [edge[(at + 1) * len(edge) // count - 1] for at in range(count)]
        with _DryRuns(lambda truth: self._judge(truth, task)) as on_the_way:
            for price in chosen:
                self.tell(f"dry run for the page: {price.candidate.words()}")
                text = self.preset(task, price.candidate)
                on_the_way.start(
                    tracing_whole(task, self.model, price.candidate, text, check=True, shared=shared)
                )
            on_the_way.finish_all()

    def _judge(self, truth: TracedWhole | NotTraced, task: SearchTask) -> None:
        if isinstance(truth, NotTraced):
            self.found.failed.append(truth)
            self.refused[truth.candidate.kind, truth.candidate.trace_class] = truth.reason
            return
        if truth.peak <= task.memory:
            self.found.results.append(truth)
        else:
            self.found.too_large.append(truth)


def scaled_peak(price: Estimate, traced: Sequence[TracedWhole], estimated: Mapping[Candidate, int]) -> float:
    """The bytes that a candidate needs at least, if its estimate errs as those of like candidates that were dry-run: by the
    smallest of their factors, less `ALIKE`, `ALIKE_BUT_CP` or `ALIKE_BUT_METHOD`. 0 where there are none. `estimated` are the
    estimated peaks.
    """

    def factor(likeness: Callable[[Candidate], object]) -> float:
        key = likeness(price.candidate)
        known = (one for one in traced if one.candidate in estimated and likeness(one.candidate) == key)
        return min((one.peak / estimated[one.candidate] for one in known), default=0.0)

    return price.peak * max(
        factor(_errs_like) / ALIKE,
        factor(_but_cp) / ALIKE_BUT_CP,
        factor(lambda one: replace(one, method="")) / ALIKE_BUT_METHOD,
    )


def _errs_like(candidate: Candidate) -> object:
    """What candidates have in common whose estimated peaks err alike: all but sizes of the data axes, rows, and cp's method."""
    pipeline = candidate.pp, candidate.schedule, candidate.stages_per_rank
    key = replace(candidate.trace_class, method="")
    return key, pipeline, candidate.share, candidate.reshard_after_forward


def _but_cp(candidate: Candidate) -> object:
    """All but the ranks that a sequence is split over, and the sequences of a rank, which are as many more."""
    tokens = candidate.rows / candidate.cp
    return replace(candidate, cp=1, method="", rows=1, dp_shard=candidate.shards), tokens


class _DryRuns:
    """Dry runs side by side, which end in the order in which they were started. Those that are left are stopped."""

    def __init__(self, judge: Callable[[TracedWhole | NotTraced], None]) -> None:
        self.judge = judge
        self.waiting: deque[tuple[ExitStack, Callable[[], TracedWhole | NotTraced]]] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def start(self, dry_run: AbstractContextManager[Callable[[], TracedWhole | NotTraced]]) -> None:
        """Start one more, and finish the one before if there are SIDE_BY_SIDE."""
        stack = ExitStack()
        self.waiting.append((stack, stack.enter_context(dry_run)))
        if len(self.waiting) >= SIDE_BY_SIDE:
            self.finish()

    def finish(self) -> None:
        """Wait for the first."""
        stack, result = self.waiting.popleft()
        with stack:
            self.judge(result())

    def finish_all(self) -> None:
        """Wait for all."""
        while self.waiting:
            self.finish()

    def __enter__(self) -> _DryRuns:
        return self

    def __exit__(self, *error: object) -> None:
        while self.waiting:
            self.waiting.popleft()[0].close()
