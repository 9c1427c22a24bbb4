"""A step of many microbatches from a recording of a few.

What an action of a schedule computes depends on its kind and stage, and on whether it is the first or the last of these:
FSDP gathers in the first forward and reduces in the last backward, the first backward allocates the gradients. All others
are alike. So microbatches are recorded that have the first, the second and the last action of every kind, and the
recordings are put together in the order of the whole schedule. Where backwards are split, the second of two halves may run
before or behind other backwards at the begin and the end of a step: there two more are recorded.

What an action allocates and frees of messages may belong to other actions: a receive begins one message ahead, and what was sent
is released when an answer comes. These recordings are kept by message, and are put where `RankMessages` has them in the whole
schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from parallelizer.language.pipeline.actions import BACKWARD_WEIGHT, Action, Order
from parallelizer.language.pipeline.messages import (
    POST,
    RELEASE,
    RankMessages,
    Steps,
    sender_stage,
    traffic,
)
from parallelizer.runtime.pipeline.forms import Forms
from parallelizer.runtime.pipeline.live import LivePipeline, key_of
from parallelizer.runtime.pipeline.microbatches import Batch
from parallelizer.runtime.state import state_of
from parallelizer.styles.application import Program

T = TypeVar("T")

FEW = 3
"""Actions of a kind, or accumulated parts, that stand for all."""
FEW_SPLIT = 5
"""Actions of a kind that stand for all where backwards are split: the first three and the last two."""

Lists = list[list[Any]]
"""The lists of a recording, or a stretch of each."""


def prepare(model: nn.Module, forms: Forms, microbatch: Batch) -> LivePipeline | None:
    """The pipeline of a model that was cut, whose stages are told `forms` from now on; None without one."""
    state = state_of(model)
    if state is None or state.pipeline is None:
        return None
    for stage in range(1, len(state.pipeline.stages)):
        state.pipeline.forms[key_of(microbatch), stage] = forms
    return state.pipeline


def sample(pipeline: LivePipeline) -> tuple[int, ...]:
    """The microbatches that stand for all on this rank."""
    by_kind: dict[tuple[Any, int], list[int]] = {}
    for action in pipeline.order[pipeline.rank]:
        by_kind.setdefault((action.kind, action.stage), []).append(action.microbatch)
    few = few_actions(pipeline.order)
    return tuple(sorted({each[at] for each in by_kind.values() for at in _few(len(each), few)}))


def few_actions(order: Order) -> int:
    """How many actions of a kind stand for all."""
    split = any(action.kind is BACKWARD_WEIGHT for actions in order for action in actions)
    return FEW_SPLIT if split else FEW


def every_part(lists: Lists, marks: Marks, parts: int) -> Lists:
    """The lists of a recording without a pipeline, with the second of its few parts as often as there are `parts`."""
    begins = [at for mark, at in marks.noted if isinstance(mark[0], int)]
    if parts <= len(begins):
        return lists
    return [
        [*items[:end], *(parts - len(begins)) * items[begin:end], *items[end:]]
        for items, begin, end in zip(lists, begins[1], begins[2], strict=True)
    ]


def few_parts(parts: Sequence[T]) -> list[T]:
    """The accumulated parts that stand for all."""
    return [parts[at] for at in _few(len(parts), FEW)]


def _few(count: int, few: int) -> tuple[int, ...]:
    """Which of `count` stand for all: those that begin, the last of which stands for those between, and those that end."""
    ending = few // 2
    if count <= few:
        return tuple(range(count))
    return (*range(few - ending), *range(count - ending, count))


@dataclass
class Marks:
    """Where in a recording what begins. `counts` says how long its lists are now."""

    counts: Callable[[], tuple[int, ...]]
    noted: list[tuple[Any, tuple[int, ...]]] = field(default_factory=list)

    def note(self, mark: Any) -> None:
        """Something begins: see `progress`."""
        self.noted.append((mark, self.counts()))

    def of(self, *lists: int, since: int = 0) -> Marks:
        """The same for some of the lists; the second of all, the events of the memory, is counted from one of them."""
        return Marks(
            self.counts,
            [(mark, tuple(at[i] - (since if i == 1 else 0) for i in lists)) for mark, at in self.noted],
        )


Place = tuple[str, str, int]
"""`receive` or `send`, and the kind of a message and the stage that it is for."""


@dataclass(frozen=True)
class Pieces:
    """A recording in pieces: before the first action, the actions by part in order, behind the last action of each part,
    and what belongs to one message by what was done and its kind and stage. An action is a list of stretches, and of
    places where messages of a kind to a stage are received or sent.
    """

    before: Lists
    actions: dict[tuple[int, Any, int], list[list[Lists | Place]]]
    ends: dict[int, Lists]
    messages: dict[tuple[str, str, int], Lists]


def stage_kinds(program: Program, model: nn.Module) -> list[object]:
    """Of each stage what is equal for stages that are alike: as many units and parameters of the same shapes, and as many
    tensors that cross. `model` is as it was compiled.
    """
    stages = program.require_stages()
    shapes: list[list[object]] = [[] for _ in stages.stages]
    for name, param in model.named_parameters():
        for index in stages.copies(name):
            shapes[index].append((tuple(param.shape), str(param.dtype)))
    return [
        (shapes[at], len(one.units), len(one.receives), len(one.sends), at in (0, len(stages) - 1))
        for at, one in enumerate(stages.stages)
    ]


def alike(program: Program, model: nn.Module, rank: int) -> list[int]:
    """The ranks on `pp` whose stages are like those of `rank`. They run the same actions in another order."""
    stages, kinds = program.require_stages(), stage_kinds(program, model)

    def kind(rank: int) -> list[object]:
        return [kinds[at] for at in stages.on_rank(rank)]

    return [other for other in range(stages.ranks) if kind(other) == kind(rank)]


def whole_step(pieces: Pieces, pipeline: LivePipeline, parts: int, rank: int | None = None) -> Lists:
    """The lists of a recording, as they are for all microbatches and all `parts`. With a `rank` on `pp` as they
    are there: its stages must be alike, and modules are called as on the rank that was recorded.
    """
    rank = pipeline.rank if rank is None else rank
    mine, there = pipeline.stages.on_rank(pipeline.rank), pipeline.stages.on_rank(rank)
    shift = {other: own - other for own, other in zip(mine, there, strict=True)}
    result: Lists = [list(items) for items in pieces.before]

    def add(piece: Lists) -> None:
        for items, more in zip(result, piece, strict=True):
            items += more

    def follow(steps: Steps) -> None:
        for step, message in steps:
            if step in (POST, RELEASE):
                kind, to, _ = message
                # A receive is for a stage of this rank, a send is from one.
                here = to if step is POST else sender_stage(message)
                add(pieces.messages[str(step), kind, to + shift[here]])

    actions = pipeline.order[rank]
    few = few_actions(pipeline.order)
    recorded = 1 + max(pieces.ends)
    moving = traffic(pipeline.order, rank, pipeline.ranks)
    for part in range(parts):
        messages = RankMessages(moving, pipeline.ranks)
        stands = stand_in(part, parts, recorded)
        number = occurrences(actions)
        for action, (at, count) in zip(actions, number, strict=True):
            own = action.stage + shift[action.stage]
            those = pieces.actions[stands, action.kind, own]
            for piece in those[stand_in(at, count, len(those), few)]:
                if not isinstance(piece, tuple):
                    add(piece)
                    continue
                what, kind, stage = piece
                message = (kind, stage - own + action.stage, action.microbatch)
                follow(messages.receive(message) if what == "receive" else messages.send(message))
        follow(messages.finish())
        add(pieces.ends[stands])
    return result


def occurrences(actions: Sequence[Action]) -> list[tuple[int, int]]:
    """Of each action, which of its kind and stage it is, and how many there are."""
    counts: dict[tuple[Any, int], int] = {}
    places = []
    for action in actions:
        kind = action.kind, action.stage
        places.append(counts.get(kind, 0))
        counts[kind] = places[-1] + 1
    return [(at, counts[a.kind, a.stage]) for at, a in zip(places, actions, strict=True)]


def stand_in(at: int, count: int, recorded: int, few: int = FEW) -> int:
    """Which of those that are `recorded` stands for the one at `at` of `count`, by the rule of `few`."""
    ending = few // 2
    beginning = few - ending
    if at < beginning or count <= recorded:
        return at
    return recorded - (count - at) if at >= count - ending else beginning - 1


def pieces_of(lists: Lists, marks: Marks) -> Pieces:
    """A recording of a few microbatches and parts, in pieces."""
    noted = [*marks.noted, (None, tuple(map(len, lists)))]

    def stretch(begin: tuple[int, ...], end: tuple[int, ...]) -> Lists:
        return [items[b:e] for items, b, e in zip(lists, begin, end, strict=True)]

    before = stretch(tuple(0 for _ in lists), noted[0][1])
    actions: dict[tuple[int, Any, int], list[list[Lists | Place]]] = {}
    ends: dict[int, Lists] = {}
    messages: dict[tuple[str, str, int], Lists] = {}
    current: list[Lists | Place] = []
    inside = 0
    behind: int | None = None
    for (mark, begin), (_, end) in itertools.pairwise(noted):
        first, second = mark
        piece = stretch(begin, end)
        if isinstance(first, int):
            if second is None:
                behind, ends[first] = first, piece
                continue
            behind, current = None, []
            actions.setdefault((first, second.kind, second.stage), []).append(current)
        elif first in (POST, RELEASE):
            messages.setdefault((first, *second[:2]), piece)
            continue
        elif first in ("receive", "finish"):
            inside += 1
        elif first in ("end receive", "end finish"):
            inside -= 1
        if first in ("send", "receive"):
            current.append((first, *second[:2]))
        if inside:
            continue
        if behind is not None:
            ends[behind] = [[*a, *b] for a, b in zip(ends[behind], piece, strict=True)]
        else:
            current.append(piece)
    return Pieces(before, actions, ends, messages)
