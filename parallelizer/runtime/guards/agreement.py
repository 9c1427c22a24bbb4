"""An exchange between all ranks once a step: requests to stop, the step of each rank, and its position in the
data.

It is five numbers, whose greatest over all ranks say it. `train_step` reduces them with its own check of the step:
`Agreement.words` makes them, and `Agreement.read` reads them. In another loop `tell` and `heard` reduce them over a group of
their own, on the CPU, which neither waits for a GPU nor mixes with the collectives of the step. Only ranks that
disagree exchange more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.runtime.fail_together import gathered
from parallelizer.runtime.guards.checksum import digest
from parallelizer.runtime.guards.wording import ranks_named
from parallelizer.runtime.launch.failures import LaunchError


@dataclass(frozen=True)
class Verdict:
    """What all ranks agree to have heard. `stop` is the highest signal that any rank was asked to stop with, or 0.

    `out_of_step` are the ranks that differ from most others; every rank where no more than half of them are alike.
    `steps` and `positions`, by rank, are what they said, and empty when all said the same; positions are digests.
    """

    stop: int = 0
    out_of_step: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()


class Agreement:
    """One exchange a step between all ranks of the world; with one rank nothing is sent. Collective: every rank makes
    it, and calls `tell` and `heard` in turns; or `words` and `read`, of which several `words` may come first.

    `timeout`, in seconds, is how long `heard` waits for the last rank to tell. That rank may be computing, so it is
    to be longer than a step; a watchdog is who says that a rank is stuck.
    """

    def __init__(self, timeout: float = 600.0) -> None:
        self.timeout = timeout
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._group: dist.ProcessGroup | None = None
        self._told: torch.Tensor | None = None
        self._mine: deque[tuple[int, int]] = deque()
        self._work: dist.Work | None = None

    def words(self, step: int, *, stop: int = 0, position: object = None) -> torch.Tensor:
        """What this rank says of a step, for `train_step`; the arguments are those of `tell`."""
        place = 0 if position is None else digest(position)
        self._mine.append((step, place))
        # The least is the greatest of the opposites: one reduction finds both.
        return torch.tensor([stop, step, -step, place, -place])

    def read(self, greatest: Sequence[int]) -> Verdict:
        """What the greatest of all ranks' words say, the earliest that were not read; the same on all of them. Collective
        where they disagree.
        """
        mine = self._mine.popleft()
        stop, step, less_step, place, less_place = greatest
        if step == -less_step and place == -less_place:
            return Verdict(stop)
        return self._named(stop, mine)

    def tell(self, step: int, *, stop: int = 0, position: object = None) -> None:
        """Say which step this is, and start to listen. Does not wait.

        `stop` is the signal that this rank was asked to stop with, 0 for none. `position` is where in the data the
        step is, the same on every rank: anything whose `repr` says it.
        """
        if self._told is not None:
            raise RuntimeError("tell was called twice, with no heard in between")
        self._mine.clear()  # words that did not travel with a step
        self._told = self.words(step, stop=stop, position=position)
        if self.ranks > 1:
            if self._group is None:
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
            self._work = dist.all_reduce(self._told, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def heard(self) -> Verdict:
        """Wait for every rank's word; the same on all of them. Raises LaunchError where one of them never comes."""
        if self._told is None:
            raise RuntimeError("heard was called before tell")
        step = self._mine[0][0]
        try:
            if self._work is not None:
                self._work.wait()
            return self.read(self._told.tolist())
        except RuntimeError as error:
            message = f"no rank can agree with all others after step {step}: {_first_line(error)}"
            help = "one of them has ended, or took longer than launch.collective_timeout: see its log"
            raise LaunchError(message, help) from error
        finally:
            self._told = self._work = None

    def _named(self, stop: int, mine: tuple[int, int]) -> Verdict:
        """The second exchange: who said what."""
        said = gathered(mine, self._group)
        steps, places = zip(*said, strict=True)
        return Verdict(stop, minority(said), steps, places)


def minority(said: Sequence[object]) -> tuple[int, ...]:
    """The places of those that differ from more than half of all; of everyone where no such half is."""
    most, count = Counter(said).most_common(1)[0]
    if 2 * count <= len(said):
        return tuple(range(len(said)))
    return tuple(place for place, one in enumerate(said) if one != most)


def out_of_step(verdict: Verdict) -> Diagnostic | None:
    """The finding `out-of-step`, or None where all ranks agree."""
    if not verdict.out_of_step:
        return None
    said = list(zip(verdict.steps, verdict.positions, strict=True))
    apart: dict[tuple[int, int], list[int]] = {}
    for rank in verdict.out_of_step:
        apart.setdefault(said[rank], []).append(rank)
    rest = [one for rank, one in enumerate(said) if rank not in verdict.out_of_step]
    if rest:
        told = [_against(one, own, rest[0], len(rest)) for one, own in apart.items()]
    elif len(set(verdict.steps)) == 1:
        told = [f"in step {verdict.steps[0]} {ranks_named(range(len(said)))} read different data"]
    else:
        told = [_at(step, own) for (step, _), own in apart.items()]
    help = "resume from the last checkpoint: the sums of these ranks since then mix different steps"
    return Diagnostic("out-of-step", "; ".join(told), None, help)


def _against(said: tuple[int, int], ranks: Sequence[int], most: tuple[int, int], count: int) -> str:
    if said[0] == most[0]:
        verb = "reads" if len(ranks) == 1 else "read"
        return f"in step {said[0]} {ranks_named(ranks)} {verb} other data than the other {count}"
    return f"{_at(said[0], ranks)}, the other {count} at step {most[0]}"


def _at(step: int, ranks: Sequence[int]) -> str:
    return f"{ranks_named(ranks)} {'is' if len(ranks) == 1 else 'are'} at step {step}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
