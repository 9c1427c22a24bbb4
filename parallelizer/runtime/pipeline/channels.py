"""Messages between neighbouring stages: tensors of known shapes, sent and received as `RankMessages` says.

Why no ranks wait for each other in a circle, whatever the backend:

- Each channel, one kind of messages from one rank to another, has a process group of these two ranks. NCCL runs the operations
  of a group one after another on one stream: a send stays there until its receiver has come. In a group with other channels, a
  receive that was begun ahead would hold up a send behind it, on which the message that it waits for may depend. In a channel,
  both ranks have the same operations in the same order, so none waits for one behind it.
- The process and the stream of computation wait for a message when an action needs it, and for a send when a message that came
  says that it has arrived. So every wait is for what other ranks do before, and `replay` finds all orders that get stuck.
- A communicator that is made by its first operation stops the process until the other rank begins to use it, which may be after
  that rank waits for this one. So every channel carries one number when it is made (`open_channels`).
- NCCL's kernels hold processors of the GPU while they wait. There is one of each channel of a rank at most, whatever number of
  messages is under way, beside the computation.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from parallelizer.compiler.observe.phase import phase
from parallelizer.language.pipeline.messages import (
    POST,
    SEND,
    WAIT,
    Channel,
    Message,
    RankMessages,
    Steps,
    channel_of,
    rounds_of_channels,
    sender_stage,
)
from parallelizer.runtime.pipeline import progress
from parallelizer.runtime.pipeline.forms import TensorForm

_moving: list[str] = []


def moving() -> str | None:
    """The module before which the cut lies that a message crosses; None while there is none."""
    return _moving[-1] if _moving else None


@contextmanager
def crossing(module: str) -> Iterator[None]:
    """Inside, messages are said to cross the cut before a module."""
    _moving.append(module)
    try:
        yield
    finally:
        _moving.pop()


@dataclass
class Channels:
    """The messages of one rank in one pass. `groups` has the process group of each channel, `world` the rank in the world of
    each rank on `pp`. `shapes` says what the tensors of a message are whose local parts travel, and `known` whether it knows
    that without waiting; `cut` is the module of `crossing`.
    """

    messages: RankMessages
    groups: Mapping[Channel, dist.ProcessGroup]
    world: Sequence[int]
    device: torch.device
    shapes: Callable[[Message], Sequence[TensorForm]]
    known: Callable[[Message], bool]
    cut: Callable[[Message], str]
    _coming: dict[Message, list[dist.Work]] = field(default_factory=dict)
    _tensors: dict[Message, list[torch.Tensor]] = field(default_factory=dict)
    _leaving: dict[Message, list[tuple[dist.Work, torch.Tensor]]] = field(default_factory=dict)

    def receive(self, message: Message) -> list[torch.Tensor]:
        """The tensors of one message. Those that come before it are kept for later."""
        with progress.marked("receive", message):
            self._follow(self.messages.receive(message, self.known))
        return self._tensors.pop(message)

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send one message. The tensors, contiguous, must not change from now on."""
        with progress.marked("send", message):
            self._follow(self.messages.send(message), tensors)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        with progress.marked("finish", None):
            self._follow(self.messages.finish())

    def _follow(self, steps: Steps, tensors: Sequence[torch.Tensor] = ()) -> None:
        for step, message in steps:
            if step is WAIT:
                for work in self._coming.pop(message):
                    work.wait()
            elif step is SEND:
                self._send(message, tensors)
            else:
                with progress.marked(str(step), message), crossing(self.cut(message)):
                    (self._post if step is POST else self._release)(message)

    def _post(self, message: Message) -> None:
        group, peer = self._way(message, self.messages.ranks[sender_stage(message)])
        made = [torch.empty(s.shape, dtype=s.dtype, device=self.device) for s in self.shapes(message)]
        works = [dist.irecv(tensor, peer, group=group) for tensor in made]
        self._coming[message] = [work for work in works if work is not None]
        self._tensors[message] = made

    def _send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        group, peer = self._way(message, self.messages.ranks[message[1]])
        with crossing(self.cut(message)):
            works = [(dist.isend(tensor, peer, group=group), tensor) for tensor in tensors]
        self._leaving[message] = [(work, tensor) for work, tensor in works if work is not None]

    def _release(self, message: Message) -> None:
        # The answer may come in another phase, or never.
        with phase("forward" if message[0] == "F" else "backward"):
            leaving = self._leaving.pop(message)
            while leaving:
                leaving.pop(0)[0].wait()

    def _way(self, message: Message, other: int) -> tuple[dist.ProcessGroup, int]:
        """The group of a message's channel, and the rank in the world of the other end."""
        channel = channel_of(message, self.messages.ranks)
        if channel is None:
            raise ValueError(f"the message {message} does not leave its rank")
        return self.groups[channel], self.world[other]


def open_channels(
    ranks: Sequence[int], world: Sequence[int], rank: int, device: torch.device
) -> dict[Channel, dist.ProcessGroup]:
    """The process groups of the channels of a rank on `pp`, by the rank of each stage; `world` as in `Channels`. Collective over
    the world.

    In each round all ranks of the world make one group, also those without a channel in it: torch names groups by their number,
    and splits them from the world's communicator of NCCL, in which every rank takes part.
    """
    found: dict[Channel, dist.ProcessGroup] = {}
    for channels in rounds_of_channels(ranks):
        mine = next((one for one in channels if rank in one[1:]), None)
        group = new_group([world[rank]] if mine is None else [world[end] for end in mine[1:]])
        if mine is not None:
            found[mine] = group
            _, sender, receiver = mine
            number = torch.zeros(1, device=device)
            work = (
                dist.isend(number, world[receiver], group=group)
                if rank == sender
                else dist.irecv(number, world[sender], group=group)
            )
            if work is not None:
                work.wait()
    return found


def new_group(ranks: list[int]) -> dist.ProcessGroup:
    """Another group over these ranks of the world. Collective over them alone: a large world has many pipelines."""
    group: dist.ProcessGroup = dist.new_group(sorted(ranks), use_local_synchronization=True)
    return group


def send_object(value: Any, peer: int, group: dist.ProcessGroup | None) -> list[tuple[Any, torch.Tensor]]:
    """Begin to send a Python object. Returns what is under way, with the tensors that must live until it has arrived."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64)
    return [(dist.isend(tensor, peer, group=group), tensor) for tensor in (size, data)]


def receive_object(peer: int, group: dist.ProcessGroup | None) -> Any:
    """A Python object that another rank of this world sends, which is trusted as this process is."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, peer, group=group)
    data = torch.zeros(int(size), dtype=torch.uint8)
    dist.recv(data, peer, group=group)
    return pickle.loads(data.numpy().tobytes())
