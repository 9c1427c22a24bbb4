"""The messages of a pipeline: who sends them, and what a rank does to receive and to send them, step by step.

A result that another rank needs is a message. A channel carries the messages of one kind, activations `F` or gradients `B`,
from one rank to another, in the order in which they are sent.

- A rank never waits to send. So an order of actions gets stuck only where an action needs a result that does not come, which
  is what `replay` finds. If each send waited for the one before, ranks could wait for each other in a circle: some orders of
  `interleaved-zero-bubble` would.
- A rank receives the messages of a channel in order. It keeps those that it needs later. It begins to receive one message
  ahead.
- What was sent needs its memory until it has arrived. A message from a rank also says that this rank has received all that
  it needed until then: what was sent to it and is among these is released, without waiting. The rest is released at the end
  of the step. So the memory depends on the order alone, not on how fast the ranks are.
- A pass without backwards has no answers, and would keep all microbatches. Its order goes in rounds of microbatches, and a
  rank waits for what it sent two rounds before. All ranks run the rounds, and in a round the stages, in order: such a wait is
  for a receive that comes earlier in this common order, so no ranks can wait in a circle.

The runtime, the dry run and the tests all follow `RankMessages`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from parallelizer.language.pipeline.actions import SENDS_GRADIENT, Action, ActionKind, Order

Message = tuple[str, int, int]
"""`F` for an activation or `B` for a gradient, the stage that it is for, and its microbatch."""

Channel = tuple[str, int, int]
"""The kind of its messages, the rank on `pp` that sends them, and the rank that receives them."""


class MessageStep(StrEnum):
    """What is done with a message: begin to receive it, wait for it, begin to send it, or wait until it has arrived and release
    its memory.
    """

    POST = "post"
    WAIT = "wait"
    SEND = "send"
    RELEASE = "release"


POST, WAIT, SEND, RELEASE = MessageStep


def sent_by(action: Action, last: int) -> Message | None:
    """The result of an action that another stage needs; `last` is the last stage."""
    if action.kind is ActionKind.FORWARD and action.stage < last:
        return "F", action.stage + 1, action.microbatch
    if action.kind in SENDS_GRADIENT and action.stage:
        return "B", action.stage - 1, action.microbatch
    return None


def needed_by(action: Action, last: int) -> Message | None:
    """The result of another stage that an action needs; `last` is the last stage."""
    if action.kind is ActionKind.FORWARD and action.stage:
        return "F", action.stage, action.microbatch
    if action.kind in SENDS_GRADIENT and action.stage < last:
        return "B", action.stage, action.microbatch
    return None


def sender_stage(message: Message) -> int:
    """The stage that sends a message."""
    kind, stage, _ = message
    return stage - 1 if kind == "F" else stage + 1


def channel_of(message: Message, ranks: Sequence[int]) -> Channel | None:
    """The channel of a message, by the rank of each stage; None if both stages are on one rank."""
    sender, receiver = ranks[sender_stage(message)], ranks[message[1]]
    return None if sender == receiver else (message[0], sender, receiver)


def channels(ranks: Sequence[int]) -> tuple[Channel, ...]:
    """All channels between the ranks of the stages, without those in which nothing is sent."""
    messages = [
        message for stage in range(len(ranks) - 1) for message in (("F", stage + 1, 0), ("B", stage, 0))
    ]
    return tuple(sorted({c for m in messages if (c := channel_of(m, ranks)) is not None}))


def rounds_of_channels(ranks: Sequence[int]) -> list[list[Channel]]:
    """The channels in rounds in which each rank is in one channel at most."""
    rounds: list[list[Channel]] = []
    for channel in channels(ranks):
        ends = set(channel[1:])
        free = (one for one in rounds if not ends & {rank for other in one for rank in other[1:]})
        found = next(free, None)
        if found is None:
            rounds.append([channel])
        else:
            found.append(channel)
    return rounds


@functools.lru_cache(4)
def forward_order(ranks: tuple[int, ...], microbatches: int) -> Order:
    """The order of a pass without backwards, by the rank of each stage: in rounds of as many microbatches as there are ranks,
    a rank runs its stages in turn on all of a round. So when a rank begins its second stage, the first microbatch has come
    back to it.
    """
    count = 1 + max(ranks)
    rounds = [range(at, min(at + count, microbatches)) for at in range(0, microbatches, count)]
    return tuple(
        tuple(
            Action(ActionKind.FORWARD, stage, microbatch)
            for each in rounds
            for stage, other in enumerate(ranks)
            if other == rank
            for microbatch in each
        )
        for rank in range(count)
    )


@dataclass(frozen=True)
class Traffic:
    """The messages to and from one rank. `incoming` has those of each channel to it, in the order in which they are sent.
    `answered` has, for a message to it, of each channel to the sender how many messages have arrived when this one has.
    """

    incoming: Mapping[Channel, tuple[Message, ...]]
    answered: Mapping[Message, Mapping[Channel, int]]


def traffic(order: Order, rank: int, ranks: Sequence[int]) -> Traffic:
    """The messages of a rank, by the actions of all ranks and the rank of each stage."""
    last = len(ranks) - 1
    outgoing = {message: at for _, at, message in _numbered(order[rank], rank, ranks)}
    incoming: dict[Channel, tuple[Message, ...]] = {}
    answered: dict[Message, Mapping[Channel, int]] = {}
    for peer, actions in enumerate(order):
        if peer == rank:
            continue
        arrived: dict[Channel, int] = {}
        to: dict[Channel, list[Message]] = {}
        for action in actions:
            needed = needed_by(action, last)
            if needed in outgoing:
                channel = (needed[0], rank, peer)
                arrived[channel] = max(arrived.get(channel, 0), outgoing[needed] + 1)
            message = sent_by(action, last)
            if message is not None and ranks[message[1]] == rank:
                to.setdefault((message[0], peer, rank), []).append(message)
                answered[message] = dict(arrived)
        incoming |= {channel: tuple(messages) for channel, messages in to.items()}
    return Traffic(incoming, answered)


def _numbered(
    actions: Sequence[Action], rank: int, ranks: Sequence[int]
) -> Iterator[tuple[Channel, int, Message]]:
    """What a rank sends: the channel, the number of the message in it, and the message."""
    counts: dict[Channel, int] = {}
    for action in actions:
        message = sent_by(action, len(ranks) - 1)
        channel = None if message is None else channel_of(message, ranks)
        if message is not None and channel is not None:
            yield channel, counts.get(channel, 0), message
            counts[channel] = counts.get(channel, 0) + 1


Steps = Iterator[tuple[MessageStep, Message]]


class RankMessages:
    """What one rank does with its messages in a pass through an order. Each method gives the steps of one call; take them one by
    one. With `round_size`, the number of microbatches of a round, a message waits for those of two rounds before.
    """

    def __init__(self, traffic: Traffic, ranks: Sequence[int], round_size: int | None = None) -> None:
        self.traffic, self.ranks, self.round_size = traffic, ranks, round_size
        self.posted: dict[Channel, int] = dict.fromkeys(traffic.incoming, 0)
        self.taken: dict[Channel, int] = dict.fromkeys(traffic.incoming, 0)
        self.kept: set[Message] = set()
        self.sent: dict[Channel, list[Message]] = {}
        self.released: dict[Channel, int] = {}

    def receive(self, message: Message, known: Callable[[Message], bool] = lambda _: True) -> Steps:
        """Receive a message. One whose shapes are not `known` yet is not received ahead. Raises ValueError for a message that no
        rank sends.
        """
        channel = channel_of(message, self.ranks)
        if channel is None or message not in self.traffic.answered:
            raise ValueError(f"no rank sends the message {message}")
        coming = self.traffic.incoming[channel]
        while message not in self.kept:
            at = self.taken[channel]
            if at == self.posted[channel]:
                self.posted[channel] += 1
                yield POST, coming[at]
            self.taken[channel] += 1
            self.kept.add(coming[at])
            yield WAIT, coming[at]
            for answered, count in self.traffic.answered[coming[at]].items():
                yield from self._release(answered, count)
        self.kept.remove(message)
        ahead = self.taken[channel]
        if ahead == self.posted[channel] and ahead < len(coming) and known(coming[ahead]):
            self.posted[channel] += 1
            yield POST, coming[ahead]

    def send(self, message: Message) -> Steps:
        """Send a message. Raises ValueError for one between stages of one rank."""
        channel = channel_of(message, self.ranks)
        if channel is None:
            raise ValueError(f"the message {message} does not leave its rank")
        sent = self.sent.setdefault(channel, [])
        if self.round_size is not None:
            before = self.round_size * (message[2] // self.round_size - 1)
            while (at := self.released.get(channel, 0)) < len(sent) and sent[at][2] < before:
                yield from self._release(channel, at + 1)
        sent.append(message)
        yield SEND, message

    def finish(self) -> Steps:
        """Release all that was sent, at the end of the pass."""
        for channel, sent in self.sent.items():
            yield from self._release(channel, len(sent))

    def _release(self, channel: Channel, count: int) -> Steps:
        """Release the first messages of a channel, without those that were before."""
        for at in range(self.released.get(channel, 0), count):
            self.released[channel] = at + 1
            yield RELEASE, self.sent[channel][at]
