"""Replays an order of actions with given durations: when each action starts, how long ranks wait, and how many
microbatches they hold.

An action starts as soon as the action before it on its rank has ended and everything that it needs is there:

- a forward needs the output of the stage before,
- a backward needs the own forward, and from every stage but the last the gradient that the stage after computes,
- a backward for weights needs the own backward for the input.

A result for a stage on another rank is a message. Sending never blocks the sender, as in `messages.py`, which the runtime
follows. Each ordered pair of ranks has one
channel for activations and one for gradients. A channel carries one message at a time, in the order in which they were
sent. The receiver takes them in that order when an action needs one, and keeps those that it needs later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from parallelizer.language.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    SENDS_GRADIENT,
    Action,
    Order,
    stage_ranks,
)


@dataclass(frozen=True)
class ActionCosts:
    """The duration of each kind of action by stage, in any one unit. A whole backward takes the sum of its two parts.

    `transfer` has the durations of messages by (sending stage, receiving stage), which are neighbours; a message that
    is not there takes no time.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def equal(
        cls, stages: int, forward: float = 1, backward_input: float = 1, backward_weight: float = 1
    ) -> ActionCosts:
        """The same durations on every stage."""
        return cls((forward,) * stages, (backward_input,) * stages, (backward_weight,) * stages)

    def of(self, action: Action) -> float:
        """The duration of an action."""
        stage, kind = action.stage, action.kind
        if kind is FORWARD:
            return self.forward[stage]
        if kind is BACKWARD:
            return self.backward_input[stage] + self.backward_weight[stage]
        return (self.backward_input if kind is BACKWARD_INPUT else self.backward_weight)[stage]


class Costs(Protocol):
    """The durations of actions and of messages, in any one unit."""

    @property
    def transfer(self) -> Mapping[tuple[int, int], float]:
        """Those of messages, by sending and receiving stage."""

    def of(self, action: Action) -> float:
        """That of an action."""


@dataclass(frozen=True)
class TimedAction:
    """An action with its start and end, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Replay:
    """The actions of each rank with their times."""

    ranks: tuple[tuple[TimedAction, ...], ...]

    @cached_property
    def length(self) -> float:
        """The end of the last action of any rank."""
        return max((timed.end for rank in self.ranks for timed in rank), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait: 1 - busy / (ranks x length)."""
        busy = sum(timed.end - timed.start for rank in self.ranks for timed in rank)
        return 1 - busy / (len(self.ranks) * self.length) if self.length else 0.0

    def live(self, rank: int) -> tuple[tuple[float, int], ...]:
        """The number of microbatches whose activations a rank holds, summed over its stages, from each time on.

        A microbatch of a stage counts from the start of its forward to the end of its backward for weights.
        """
        changes = []
        for timed in self.ranks[rank]:
            if timed.action.kind is FORWARD:
                changes.append((timed.start, 1))
            elif timed.action.kind is not BACKWARD_INPUT:
                changes.append((timed.end, -1))
        counts = accumulate(change for _, change in changes)
        return tuple((time, count) for (time, _), count in zip(changes, counts, strict=True))

    def peak(self, rank: int) -> int:
        """The most microbatches of its stages that a rank holds at once."""
        return max((count for _, count in self.live(rank)), default=0)


@dataclass(frozen=True)
class RankWait:
    """A rank that cannot go on: its next action, and what that needs, of `holder`; None if no rank computes it."""

    rank: int
    action: Action
    needed: Action
    holder: int | None

    def __str__(self) -> str:
        of = (
            "no rank"
            if self.holder is None
            else "itself"
            if self.holder == self.rank
            else f"rank {self.holder}"
        )
        return f"rank {self.rank} waits at {self.action} for {self.needed} of {of}"


class StuckOrder(ValueError):
    """An order in which ranks wait for one another without end; `waits` has every rank that waits.

    `circle` has those that wait for each other, or the one that waits for an action that never runs. The others wait
    for them.
    """

    def __init__(self, waits: tuple[RankWait, ...]) -> None:
        self.waits = waits
        super().__init__(waits)

    @property
    def circle(self) -> tuple[RankWait, ...]:
        waiting = {wait.rank: wait for wait in self.waits}
        passed = [self.waits[0]]
        while (holder := passed[-1].holder) is not None:
            if waiting[holder] in passed:
                return tuple(passed[passed.index(waiting[holder]) :])
            passed.append(waiting[holder])
        return (passed[-1],)

    def __str__(self) -> str:
        return "; ".join(map(str, self.circle))


_Result = tuple[bool, int, int]
"""Whether it is a gradient, its stage, and its microbatch: an output of a stage, or the gradient of its input."""


def replay(order: Order, costs: Costs | None = None) -> Replay:
    """The times of all actions, each as early as possible. Without costs, F, I and W take 1 each on every stage.

    Raises StuckOrder if ranks wait for one another without end, and ValueError if a stage lies on two ranks or on none.
    """
    return _Replaying(order, costs).run()


class _Replaying:
    def __init__(self, order: Order, costs: Costs | None) -> None:
        self.order, self.lies = order, stage_ranks(order)
        self.costs: Costs = costs or ActionCosts.equal(len(self.lies))
        self.timed: list[list[TimedAction]] = [[] for _ in order]
        self.there: dict[tuple[_Result, int], float] = {}
        """Since when a rank has a result."""
        self.free: dict[tuple[int, int, bool], float] = {}
        """Since when a channel, from a rank to a rank and of gradients or not, has delivered all its messages."""

    def run(self) -> Replay:
        while sum(self._advance(rank) for rank in range(len(self.order))):
            pass
        waits = tuple(self._waits())
        if waits:
            raise StuckOrder(waits)
        return Replay(tuple(map(tuple, self.timed)))

    def _advance(self, rank: int) -> int:
        """Run a rank until it waits for a result. Returns the number of its actions that ran."""
        timed, before = self.timed[rank], len(self.timed[rank])
        for action in self.order[rank][before:]:
            since = [self.there.get((result, rank)) for result in self._needed(action)]
            known = [time for time in since if time is not None]
            if len(known) < len(since):
                break
            start = max([timed[-1].end if timed else 0.0, *known])
            timed.append(TimedAction(action, start, start + self.costs.of(action)))
            self._deliver(rank, action, timed[-1].end)
        return len(timed) - before

    def _needed(self, action: Action) -> list[_Result]:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is FORWARD:
            return [(False, stage - 1, microbatch)] if stage else []
        if action.kind is BACKWARD_WEIGHT:
            return [(True, stage, microbatch)]
        after = [(True, stage + 1, microbatch)] if stage + 1 < len(self.lies) else []
        return [(False, stage, microbatch), *after]

    def _deliver(self, rank: int, action: Action, end: float) -> None:
        if action.kind is BACKWARD_WEIGHT:
            return
        gradient = action.kind in SENDS_GRADIENT
        result = (gradient, action.stage, action.microbatch)
        self.there[result, rank] = end
        receiver = action.stage + (-1 if gradient else 1)
        to = self.lies[receiver] if 0 <= receiver < len(self.lies) else rank
        if to != rank:
            channel = (rank, to, gradient)
            sent = max(end, self.free.get(channel, 0.0)) + self.costs.transfer.get(
                (action.stage, receiver), 0.0
            )
            self.there[result, to] = self.free[channel] = sent

    def _waits(self) -> Iterator[RankWait]:
        every = {action: rank for rank, actions in enumerate(self.order) for action in actions}
        for rank, actions in enumerate(self.order):
            for action in actions[len(self.timed[rank]) :][:1]:
                gradient, stage, microbatch = next(
                    r for r in self._needed(action) if (r, rank) not in self.there
                )
                kinds = SENDS_GRADIENT if gradient else (FORWARD,)
                named = [Action(kind, stage, microbatch) for kind in kinds]
                needed = next((one for one in named if one in every), named[0])
                yield RankWait(rank, action, needed, every.get(needed))
