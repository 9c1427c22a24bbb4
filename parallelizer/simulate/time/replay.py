"""A time line replayed on the queues of a device: when each operator and each collective begins and ends.

The host asks for everything in the order of the line, and runs ahead of the device. Operators run one after another on the
compute queue. Collectives that styles issue run on a queue of their axis, behind what is computed before them, and the
computation waits where the line says so. FSDP's run on queues of their own:

- a gather begins when the one before is done, and when the copy behind the last gather but one is (forward), or behind the
  last (backward): FSDP keeps so many buffers. The computation waits for it at the copy out of its buffer.
- a reduction begins when its gradients are computed and the reduction before is done; the computation waits for the reduction
  before, whose buffer it frees. At the end of backward it waits for all.
- gathers and reductions that use the same links take turns.

Beside a collective an operator runs slower by `contention`. A device without streams computes and sends in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from parallelizer.simulate.record.operators import Issued, Moment, Operator, Wait
from parallelizer.simulate.time.price import Prices
from parallelizer.simulate.time.price_collectives import spread_of

COMPUTE, WAIT = "compute", "wait"


@dataclass(frozen=True)
class TimeSpan:
    """What ran on a queue from `start` to `end`, in seconds: an operator's kind, or a collective's. `waited` is how long the
    computation stood before it, and `axis` what for: an axis, or `host`.
    """

    queue: str
    start: float
    end: float
    kind: str
    phase: str
    module: str
    axis: str = ""
    waited: float = 0.0
    again: bool = False

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class _Queue:
    """When a queue is free, and from where to where it last ran."""

    free: float = 0.0
    busy: deque[tuple[float, float]] = field(default_factory=deque)

    def run(self, ready: float, seconds: float) -> tuple[float, float]:
        start = max(self.free, ready)
        self.free = start + seconds
        if seconds:
            self.busy.append((start, self.free))
        return start, self.free


@dataclass(frozen=True)
class Replayed:
    """The spans of a step in the order of their issue, and its length."""

    spans: tuple[TimeSpan, ...]
    seconds: float


class TimeLineReplay:
    """One replay; `run` it once."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.machine = prices, prices.machine
        self.contention = prices.constants.contention if self.machine.streams else 0.0
        self.compute = self.host = 0.0
        self.waits: dict[str, float] = {}
        self.links: dict[bool, _Queue] = {True: _Queue(), False: _Queue()}
        self.lanes: dict[str, _Queue] = {}
        self.gathers: deque[tuple[float, str]] = deque()
        self.copied: deque[float] = deque([0.0, 0.0], maxlen=2)
        self.reduced: tuple[float, str] = (0.0, "")
        self.issued: list[tuple[float, str]] = []
        self.spans: list[TimeSpan] = []
        self.phase = ""
        self.pending = ("", 0.0)

    def run(self, line: Sequence[Moment]) -> Replayed:
        """The line's spans. The step ends when the device and the host have done everything."""
        for moment in line:
            if moment.phase != self.phase:
                if self.phase == "backward":
                    self._stand(*self.reduced)
                self.phase = moment.phase
            if isinstance(moment, Operator):
                self._operate(moment)
            elif isinstance(moment, Wait):
                self._wait(moment)
            elif moment.unit:
                self._unit(moment)
            else:
                self._in_line(moment)
        self._stand(*self.reduced)
        ends = [self.compute, self.host, *(span.end for span in self.spans)]
        return Replayed(tuple(self.spans), max(ends, default=0.0))

    def _wait(self, wait: Wait) -> None:
        if wait.back > len(self.issued):
            return
        end, axis = self.issued[-wait.back]
        if not self._in_pieces(axis):
            self._stand(end, axis)

    def _in_pieces(self, axis: str) -> bool:
        """Whether collectives over the axis run in pieces beside the products around them."""
        return axis == "tp" and self.prices.habits.overlapped_tp

    def _stand(self, until: float, axis: str) -> None:
        """The computation waits until then for a collective over the axis."""
        if until > self.compute:
            queue, before = self.pending
            self.pending = (
                (axis, before + until - self.compute) if queue in ("", axis) else (axis, until - self.compute)
            )
            if queue not in ("", axis):
                self._waited(queue, before)
            self.compute = until

    def _waited(self, axis: str, seconds: float) -> None:
        self.spans.append(
            TimeSpan(WAIT, self.compute - seconds, self.compute, WAIT, self.phase, "", axis, seconds)
        )

    def _operate(self, operator: Operator) -> None:
        if operator.copies == "out" and self.gathers:
            self._stand(*self.gathers.popleft())
        host = self.prices.host(operator)
        self.host += host
        seconds = self.prices.operator(operator)
        if not self.machine.streams:
            seconds = (seconds + host) * self.prices.crowd
        else:
            self._stand(self.host, "host")
        axis, waited = self.pending
        self.pending = ("", 0.0)
        start = self.compute
        self.compute = start + self._stretched(start, seconds)
        self.spans.append(
            TimeSpan(
                COMPUTE,
                start,
                self.compute,
                operator.kind,
                operator.phase,
                operator.module,
                axis,
                waited,
                operator.again,
            )
        )
        if operator.copies == "out":
            self.copied.append(self.compute)

    def _stretched(self, start: float, seconds: float) -> float:
        """How long an operator takes that begins at `start`, where collectives run beside it."""
        if not self.contention:
            return seconds
        rate, now, left = 1.0 - self.contention, start, seconds
        for low, high in self._beside(start):
            if now + left <= low:
                break
            if low > now:
                left -= low - now
                now = low
            done = (high - now) * rate
            if done >= left:
                return now + left / rate - start
            left -= done
            now = high
        return now + left - start

    def _beside(self, start: float) -> list[tuple[float, float]]:
        """Where collectives run from `start` on, in order and apart from each other."""
        spans: list[tuple[float, float]] = []
        for queue in (*self.links.values(), *self.lanes.values()):
            while queue.busy and queue.busy[0][1] <= start:
                queue.busy.popleft()
            spans += queue.busy
        joined: list[tuple[float, float]] = []
        for low, high in sorted(spans):
            if joined and low < joined[-1][1]:
                low = joined[-1][1]
            if high > low:
                joined.append((max(low, start), high))
        return joined

    def _unit(self, issued: Issued) -> None:
        """One of FSDP's collectives."""
        entry = issued.entry
        seconds = self.prices.collective(issued)
        link = self.links[spread_of(entry.axis, self.prices.mesh, self.machine.per_node).nodes == 1]
        if not self.machine.streams:
            start, end = link.run(self.compute, seconds + self.prices.unit)
            self._span(issued, start, end)
            self._stand(end, entry.axis)
            if entry.kind == "all_gather":
                self.gathers.append((end, entry.axis))
            return
        if entry.kind == "all_gather":
            ready = max(self.host, self.copied[0] if entry.phase == "forward" else self.copied[-1])
            start, end = link.run(ready, seconds)
            self.gathers.append((end, entry.axis))
        else:
            if entry.kind == "reduce_scatter":
                self._stand(*self.reduced)
            start, end = link.run(max(self.host, self.compute, 0.0), seconds)
            self.reduced = (end, entry.axis)
        self._span(issued, start, end)
        self.issued.append((end, entry.axis))

    def _in_line(self, issued: Issued) -> None:
        """A collective on its axis's queue. One of the process group's own, without a wait, is waited for at once."""
        entry = issued.entry
        lane = self.lanes.setdefault(entry.axis, _Queue())
        if self._in_pieces(entry.axis):
            self._stand(lane.free, entry.axis)
        asked, seconds = self.prices.asking(issued), self.prices.collective(issued)
        if self.machine.streams:
            self.host += asked
        else:
            seconds += asked
        start, end = lane.run(max(self.compute, self.host), seconds)
        self._span(issued, start, end)
        self.issued.append((end, entry.axis))
        if issued.waits or not self.machine.streams:
            self._stand(end, entry.axis)

    def _span(self, issued: Issued, start: float, end: float) -> None:
        entry = issued.entry
        self.spans.append(TimeSpan(entry.axis, start, end, entry.kind, entry.phase, entry.module, entry.axis))


def replay(line: Sequence[Moment], prices: Prices) -> Replayed:
    """Replay a time line at these prices."""
    return TimeLineReplay(prices).run(line)
