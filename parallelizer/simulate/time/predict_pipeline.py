"""The time of a pipeline's step: its actions priced one by one, and put in the order of the schedule.

An action is replayed on the queues of its rank by itself: FSDP's gathers in the first forward of a stage, its reductions in
the last backward. Messages take the links between their ranks, and never block the sender.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelizer.language.pipeline.actions import Action, ActionKind, Order, stage_ranks
from parallelizer.language.pipeline.replay import Replay
from parallelizer.language.pipeline.replay import replay as replay_order
from parallelizer.language.plan import Mesh
from parallelizer.simulate.record.action_lines import Line, PipelineLines
from parallelizer.simulate.record.operators import Issued
from parallelizer.simulate.record.pipeline_step import FEW, few_actions, stand_in
from parallelizer.simulate.time.constants import FITTED, Constants
from parallelizer.simulate.time.machine import Machine
from parallelizer.simulate.time.predict import StepTime, Tally, step_time_of
from parallelizer.simulate.time.price import Habits, Prices, total_flops
from parallelizer.simulate.time.replay import TimeSpan, replay

BUBBLE = "bubble"
"""What a rank waits for while other stages compute, in `StepTime.waits`."""


@dataclass(frozen=True)
class PricedAction:
    """An action's seconds, the seconds of the messages that it sends, what runs in it, and its operations: the model's, those
    that are computed again, and those that a causal mask hides.
    """

    seconds: float
    message: float
    spans: tuple[TimeSpan, ...]
    flops: tuple[int, int, int]


@dataclass(frozen=True)
class PricedOrder:
    """The costs of a step's actions, as `replay` takes them."""

    seconds: Mapping[Action, float]
    transfer: Mapping[tuple[int, int], float]

    def of(self, action: Action) -> float:
        """The seconds of an action."""
        return self.seconds[action]


class PricedPipeline:
    """The actions of a pipeline on a machine, each kind priced once."""

    def __init__(self, lines: PipelineLines, prices: Prices) -> None:
        self.lines, self.prices = lines, prices
        self.parts = min(lines.parts, FEW)
        """The parts that are replayed one by one; the others take what the one before the last takes."""
        self.ranks = stage_ranks(lines.order)
        self.order, self.places = _of_parts(lines.order, self.parts)
        self.few = few_actions(lines.order)
        self.priced = functools.cache(self._priced)
        self._line = functools.cache(self._line_seconds)

    def action(self, action: Action) -> PricedAction:
        """The price of an action of the whole step."""
        return self.priced(action.kind, action.stage, *self.places[action])

    def _priced(self, kind: ActionKind, stage: int, part: int, at: int, count: int) -> PricedAction:
        stands = self.lines.stand_ins[stage]
        actions = self.lines.by_stage[stands.stage].actions
        recorded = 1 + max(p for p, _, _ in actions)
        those = actions[stand_in(part, self.parts, recorded), kind, stands.stage]
        one = self._line(those[stand_in(at, count, len(those), self.few)])
        if stands.factor == 1.0:
            return one
        flops = tuple(round(n * stands.factor) for n in one.flops)
        return PricedAction(
            one.seconds * stands.factor,
            one.message,
            _stretched(one.spans, stands.factor),
            (flops[0], flops[1], flops[2]),
        )

    def _line_seconds(self, line: Line) -> PricedAction:
        messages = [m for m in line if isinstance(m, Issued) and m.entry.kind == "send"]
        own = tuple(m for m in line if not (isinstance(m, Issued) and m.entry.kind in ("send", "recv")))
        done = replay(own, self.prices)
        return PricedAction(
            done.seconds, sum(map(self.prices.collective, messages)), done.spans, total_flops(own)
        )

    def replayed(self, *, messages: bool = True) -> Replay:
        """The step's actions with their times; without `messages` these take none."""
        every = [action for actions in self.order for action in actions]
        seconds = {action: self.action(action).seconds for action in every}
        transfer: dict[tuple[int, int], float] = {}
        for action in every if messages else ():
            to = action.stage + (1 if action.kind is ActionKind.FORWARD else -1)
            if 0 <= to < len(self.ranks) and action.kind is not ActionKind.BACKWARD_WEIGHT:
                transfer[action.stage, to] = max(
                    self.action(action).message, transfer.get((action.stage, to), 0.0)
                )
        return replay_order(self.order, PricedOrder(seconds, transfer))


def predict_pipeline(
    machine: Machine,
    lines: PipelineLines,
    mesh: Mesh,
    tokens: int,
    *,
    constants: Constants = FITTED,
    habits: Habits | None = None,
) -> StepTime:
    """The time of a step of `tokens`, those of the global batch. Where it goes is that of the rank that is asked for; the
    operations are the mean of all ranks.
    """
    prices = Prices(machine, mesh, constants, habits)
    priced = PricedPipeline(lines, prices)
    timed = priced.replayed()
    if machine.cores and not prices.habits.alone:
        # Ranks that wait leave the processors to others.
        prices.crowd = machine.crowd((1 - timed.bubble) * mesh.world_size)
        priced = PricedPipeline(lines, prices)
        timed = priced.replayed()
    free = priced.replayed(messages=False)
    more = lines.parts - priced.parts
    tails = [replay(one.tail, prices) for one in {id(r): r for r in lines.by_stage.values()}.values()]
    mine = next(
        (r for s, r in lines.by_stage.items() if priced.ranks[s] == lines.rank),
        next(iter(lines.by_stage.values())),
    )
    tail = replay(mine.tail, prices)
    # The part before the last stands for those that are not replayed.
    longer = _of_middle(priced, timed) if more else 0.0
    longer_free = _of_middle(priced, free) if more else 0.0
    tally = Tally()
    busy = 0.0
    spans: list[TimeSpan] = []
    for one in timed.ranks[lines.rank]:
        action = priced.action(one.action)
        times = 1 + (more if priced.places[one.action][0] == 1 else 0) if more else 1
        busy += times * action.seconds
        tally.add(action.spans, times)
        tally.links["pp"] = tally.links.get("pp", 0.0) + times * action.message
        spans += _moved(action.spans, one.start)
        if action.message:
            phase = action.spans[-1].phase if action.spans else ""
            spans.append(TimeSpan("pp", one.end, one.end + action.message, "send", phase, "", "pp"))
    tally.add(tail.spans)
    spans += _moved(tail.spans, timed.length)
    last = max(one.seconds for one in tails)
    length, free_length = timed.length + more * longer, free.length + more * longer_free
    idle = {BUBBLE: free_length - busy + last - tail.seconds, "pp": length - free_length}
    for name, seconds in idle.items():
        if seconds > 0:
            tally.waits[name] = tally.waits.get(name, 0.0) + seconds
    if not tally.links.get("pp"):
        tally.links.pop("pp", None)
    ranks = len(lines.order)
    flops = [0, 0, 0]
    for actions in priced.order:
        for each in actions:
            times = 1 + (more if more and priced.places[each][0] == 1 else 0)
            for i, n in enumerate(priced.action(each).flops):
                flops[i] += times * n
    whole, again, hidden = (n // ranks for n in flops)
    return dataclasses.replace(
        step_time_of(prices, tally, length + last, (whole, again, hidden), tokens, tuple(spans)),
        schedule=timed,
    )


def _of_parts(order: Order, parts: int) -> tuple[Order, dict[Action, tuple[int, int, int]]]:
    """The order of several parts behind one another, whose microbatches are counted on; and of each action its part, which
    of its kind and stage it is there, and how many there are.
    """
    count = 1 + max(action.microbatch for actions in order for action in actions)
    places: dict[Action, tuple[int, int, int]] = {}
    whole = []
    for actions in order:
        number: dict[tuple[ActionKind, int], int] = {}
        for action in actions:
            number[action.kind, action.stage] = number.get((action.kind, action.stage), 0) + 1
        mine = []
        for part in range(parts):
            at: dict[tuple[ActionKind, int], int] = {}
            for action in actions:
                kind = action.kind, action.stage
                moved = dataclasses.replace(action, microbatch=part * count + action.microbatch)
                places[moved] = part, at.get(kind, 0), number[kind]
                at[kind] = at.get(kind, 0) + 1
                mine.append(moved)
        whole.append(tuple(mine))
    return tuple(whole), places


def _of_middle(priced: PricedPipeline, timed: Replay) -> float:
    """How much later the step ends by the part before the last: from the end of the first part to its own."""
    ends = [
        max(one.end for rank in timed.ranks for one in rank if priced.places[one.action][0] == part)
        for part in (0, 1)
    ]
    return ends[1] - ends[0]


def _moved(spans: tuple[TimeSpan, ...], by: float) -> Iterator[TimeSpan]:
    for span in spans:
        yield dataclasses.replace(span, start=span.start + by, end=span.end + by)


def _stretched(spans: tuple[TimeSpan, ...], factor: float) -> tuple[TimeSpan, ...]:
    return tuple(
        dataclasses.replace(s, start=s.start * factor, end=s.end * factor, waited=s.waited * factor)
        for s in spans
    )
