"""Messages between neighbouring stages: tensors of known shapes, sent and received in a known order.

A channel is one direction between two ranks, of activations or of gradients. It has a process group of its own, since
NCCL runs the operations of a group one after another: a send that waits for its receiver would hold up a receive behind
it. A receive is posted one message ahead, and a send waits until the one before it has arrived, so a rank holds at most
two messages of a channel.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

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
class Outgoing:
    """One direction to another rank of the world."""

    peer: int
    group: dist.ProcessGroup | None
    _sent: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)
    _last: Any = None

    def send(self, key: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send one message. The tensors, contiguous, must not change before the next one."""
        with progress.marked("send", key):
            self.finish()
            self._last = key
            for tensor in tensors:
                work = dist.isend(tensor, self.peer, group=self.group)
                if work is not None:
                    self._sent.append((work, tensor))

    def finish(self) -> None:
        """Wait until what was sent has arrived."""
        if self._last is None:
            return
        with progress.marked("finish", self._last):
            for work, _ in self._sent:
                work.wait()
            self._sent.clear()
        self._last = None


Shapes = Sequence[TensorForm]
"""What the tensors of a message are; their local parts travel."""


@dataclass
class Incoming:
    """One direction from another rank of the world. `expected` are the keys of the messages to come, in order, and
    `shapes` says what the tensors of one are, or None if that is not known yet; `cut` is the module of `crossing`.
    """

    peer: int
    group: dist.ProcessGroup | None
    device: torch.device
    shapes: Callable[[Any], Shapes | None]
    cut: Callable[[Any], str]
    expected: list[Any] = field(default_factory=list)
    _posted: list[tuple[Any, list[dist.Work], list[torch.Tensor]]] = field(default_factory=list)
    _kept: dict[Any, list[torch.Tensor]] = field(default_factory=dict)

    def post(self) -> None:
        """Begin to receive the next message, if none is under way and it is known what it is."""
        if self._posted or not self.expected or (shapes := self.shapes(self.expected[0])) is None:
            return
        key = self.expected.pop(0)
        with progress.marked("post", key), crossing(self.cut(key)):
            tensors = [torch.empty(s.shape, dtype=s.dtype, device=self.device) for s in shapes]
            works = [dist.irecv(tensor, self.peer, group=self.group) for tensor in tensors]
        self._posted.append((key, [work for work in works if work is not None], tensors))

    def receive(self, key: Any) -> list[torch.Tensor]:
        """The tensors of one message. Those that come before it are kept for later."""
        with progress.marked("receive", key):
            return self._receive(key)

    def _receive(self, key: Any) -> list[torch.Tensor]:
        while key not in self._kept:
            self.post()
            if not self._posted:
                raise RuntimeError(f"the message {key} is not sent by rank {self.peer}")
            arriving, works, tensors = self._posted.pop()
            for work in works:
                work.wait()
            self._kept[arriving] = tensors
        found = self._kept.pop(key)
        self.post()
        return found


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
