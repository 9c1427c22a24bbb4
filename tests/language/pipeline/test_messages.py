"""The messages of ranks that run beside each other: none waits for ever, and no wait is longer than the order makes it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.language.pipeline.actions import ActionKind, Order, parse_actions, stage_ranks
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.messages import (
    POST,
    RELEASE,
    SEND,
    WAIT,
    Message,
    RankMessages,
    channel_of,
    channels,
    forward_order,
    needed_by,
    rounds_of_channels,
    sent_by,
    traffic,
)
from parallelizer.language.pipeline.replay import StuckOrder, replay

ORDERS = [
    (name, ranks, stages, microbatches)
    for name, schedule in SCHEDULES.items()
    for ranks in (2, 3, 4, 6, 8)
    for stages in (1, 2, 3, 4)
    for microbatches in sorted({1, 2, 3, 5, 7, ranks, 2 * ranks, 3 * ranks, 4 * ranks})
    if schedule.misfit(ranks, stages, microbatches) is None
]


class World:
    """Ranks that follow their messages, as the backends let them. A send or a receive begins at once. A receive ends when the
    message was sent, and a send when the receive has begun. The operations of one channel run in order.
    """

    def __init__(self, order: Order, round_size: int | None = None) -> None:
        self.ranks = stage_ranks(order)
        self.posted: set[Message] = set()
        self.sent: set[Message] = set()
        self.done: set[tuple[str, int, int]] = set()
        """The kind, the stage and the microbatch of each action that ran."""
        self.waited = 0
        """Releases that had to wait."""
        self.most = 0
        """The most messages of one channel that a rank has sent and not released."""
        self.running = {rank: self._run(order, rank, round_size) for rank in range(len(order))}

    def run(self) -> list[int]:
        """The ranks that get stuck."""
        moved = True
        while moved:
            moved = False
            for rank, steps in list(self.running.items()):
                while (step := next(steps, None)) is not None and step:
                    moved = True
                if step is None:
                    del self.running[rank]
                    moved = True
        return sorted(self.running)

    def _run(self, order: Order, rank: int, round_size: int | None) -> Iterator[bool]:
        """True for each step that is done, and False while one has to wait."""
        messages = RankMessages(traffic(order, rank, self.ranks), self.ranks, round_size)
        last = len(self.ranks) - 1
        held: dict[object, int] = {}
        for action in (*order[rank], None):
            needed = None if action is None else needed_by(action, last)
            sent = None if action is None else sent_by(action, last)
            calls = [messages.finish()] if action is None else []
            if needed is not None and channel_of(needed, self.ranks) is not None:
                calls.append(messages.receive(needed))
            elif needed is not None:  # of another stage on this rank, which no other rank can run meanwhile
                while needed not in self.sent:
                    yield False
            if action is not None and action.kind is not ActionKind.FORWARD:
                own = "I" if action.kind is ActionKind.BACKWARD_WEIGHT else "F"
                while (own, action.stage, action.microbatch) not in self.done:
                    yield False
            if sent is not None and channel_of(sent, self.ranks) is not None:
                calls.append(messages.send(sent))
            for steps in calls:
                for step, message in steps:
                    channel = channel_of(message, self.ranks)
                    if step is POST:
                        self.posted.add(message)
                    elif step is SEND:
                        self.sent.add(message)
                        held[channel] = held.get(channel, 0) + 1
                        self.most = max(self.most, held[channel])
                    elif step is WAIT:
                        while message not in self.sent:
                            yield False
                    else:
                        assert step is RELEASE
                        held[channel] -= 1
                        if message not in self.posted and action is not None:
                            self.waited += 1
                        while message not in self.posted:
                            yield False
                    yield True
            if sent is not None and channel_of(sent, self.ranks) is None:
                self.sent.add(sent)
            if action is not None:
                self.done.add((action.kind.value, action.stage, action.microbatch))
        assert not any(held.values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_gets_stuck_and_no_rank_waits_to_send(name: str) -> None:
    for schedule, ranks, stages, microbatches in ORDERS:
        if schedule != name:
            continue
        world = World(SCHEDULES[name].order(ranks, stages, microbatches))
        assert world.run() == [], (name, ranks, stages, microbatches)
        assert world.waited == 0


def test_1f1b_keeps_no_more_messages_than_microbatches_are_live() -> None:
    world = World(SCHEDULES["1f1b"].order(4, 1, 64))
    assert world.run() == [] and world.most == 4


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_a_pass_without_backwards_goes_in_rounds(placement: str) -> None:
    """A rank that ran its first stage on every microbatch before its second would keep them all, or get stuck."""
    for ranks in (2, 3, 4, 8):
        for stages in (1, 2, 3) if placement == "loop" else (2,):
            placed = tuple(
                stage % ranks if placement == "loop" else min(stage, 2 * ranks - 1 - stage)
                for stage in range(ranks * stages)
            )
            for microbatches in (1, 2, 5, 8, 40):
                order = forward_order(placed, microbatches)
                assert sorted(map(str, (a for row in order for a in row))) == sorted(
                    f"{s}F{m}" for s in range(len(placed)) for m in range(microbatches)
                )
                world = World(order, ranks)
                assert world.run() == [], (ranks, stages, microbatches)
                assert world.most <= 2 * ranks * stages


def made(rows: list[str]) -> Order:
    return tuple(tuple(a for cell in row.split() for a in parse_actions(cell)) for row in rows)


def test_an_order_in_which_a_second_activation_overtakes_the_first_answer() -> None:
    """A rank sends stage 3's input before the receiver has asked for stage 1's next one. Sends that waited for each other would
    not end.
    """
    order = made(
        [
            "0F0 0F1 0F2 0F3 3F0 3B0 0B0 3F1 3B1 0B1 3F2 3B2 0B2 3F3 3B3 0B3",
            "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1 1F2 2F2 2B2 1B2 1F3 2F3 2B3 1B3",
        ]
    )
    world = World(order)
    assert world.run() == [] and world.waited == 0


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_ranks_get_stuck_where_the_replay_does(data: st.DataObject) -> None:
    """Of any order, with actions of a rank exchanged at random."""
    name, ranks, stages, microbatches = data.draw(
        st.sampled_from([o for o in ORDERS if o[1] < 5 and o[3] < 9])
    )
    random.seed(data.draw(st.integers(0, 2**32)))
    rows = [list(row) for row in SCHEDULES[name].order(ranks, stages, microbatches)]
    for _ in range(data.draw(st.integers(0, 6))):
        row = random.choice(rows)
        at, to = random.randrange(len(row)), random.randrange(len(row))
        row[at], row[to] = row[to], row[at]
    order = tuple(map(tuple, rows))
    try:
        replay(order)
        stuck = False
    except StuckOrder:
        stuck = True
    world = World(order)
    assert bool(world.run()) == stuck
    assert world.waited == 0


def test_the_rounds_of_channels_hold_each_channel_once_and_each_rank_once() -> None:
    for schedule in SCHEDULES.values():
        for ranks in (2, 3, 4, 5, 8):
            placed = [schedule.rank_of(s, ranks) for s in range(ranks * schedule.stages_per_rank)]
            rounds = rounds_of_channels(placed)
            assert sorted(c for one in rounds for c in one) == sorted(channels(placed))
            for one in rounds:
                ends = sorted(rank for _, *pair in one for rank in pair)
                assert all(a != b for a, b in pairwise(ends))
            assert len(rounds) <= 12
