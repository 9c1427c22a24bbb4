"""What an order lacks for a whole step: every stage runs every microbatch forward once and backward once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from parallelizer.language.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    ActionKind,
    Order,
    all_actions,
    microbatch_count,
)


@dataclass(frozen=True)
class OrderMistake:
    """A problem of an order, at an action of a rank, or at a rank as a whole."""

    message: str
    help: str
    rank: int
    action: Action | None = None


def order_mistakes(order: Order) -> tuple[OrderMistake, ...]:
    """What is wrong with the actions of an order, at most one mistake for each stage; nothing is said about who waits."""
    return tuple(_of_stages(order)) or tuple(_alone(order)) or tuple(_of_microbatches(order))


def _of_stages(order: Order) -> Iterator[OrderMistake]:
    """Every stage lies on one rank, and every rank has as many."""
    first: dict[int, tuple[int, Action]] = {}
    for rank, actions in enumerate(order):
        if not actions:
            yield OrderMistake(
                f"rank {rank} has no actions", "a row a rank, with the actions of its stages", rank
            )
        own = {action.stage: action for action in reversed(actions)}  # the first action of each stage
        for stage, action in own.items():
            other, _ = first.setdefault(stage, (rank, action))
            if other != rank:
                message = f"stage {stage} lies on rank {other} and on rank {rank}"
                yield OrderMistake(message, "all actions of a stage belong to one rank", rank, action)
    missing = next((stage for stage in range(len(first)) if stage not in first), None)
    if missing is not None:
        highest = max(first)
        message = f"there is a stage {highest}, but no stage {missing}"
        yield OrderMistake(message, "stages are numbered from 0 without gaps", *first[highest])
        return
    counts = Counter(rank for rank, _ in first.values())
    uneven = next((rank for rank in counts if counts[rank] != counts[0]), None)
    if uneven is not None:
        message = f"rank {uneven} has {_stages(counts[uneven])}, but rank 0 has {counts[0]}"
        yield OrderMistake(message, "give every rank as many stages", uneven)


def _stages(count: int) -> str:
    return f"{count} stage{'s' if count != 1 else ''}"


def _alone(order: Order) -> Iterator[OrderMistake]:
    """An action whose microbatch no other action has: its number is probably mistyped."""
    counts = Counter(action.microbatch for action in all_actions(order))
    for rank, actions in enumerate(order):
        for action in actions:
            if counts[action.microbatch] == 1 and len(counts) > 1:
                own = {a.microbatch for a in actions if (a.stage, a.kind) == (action.stage, action.kind)}
                lacking = [
                    Action(action.kind, action.stage, microbatch)
                    for microbatch in sorted(counts)
                    if microbatch not in own
                ]
                message = f"{action} is the only action of microbatch {action.microbatch}"
                instead = (
                    f"{lacking[0]} is missing: write it instead"
                    if len(lacking) == 1
                    else "correct its number"
                )
                yield OrderMistake(message, instead, rank, action)


def _of_microbatches(order: Order) -> Iterator[OrderMistake]:
    kinds: defaultdict[tuple[int, int], list[ActionKind]] = defaultdict(list)
    for action in all_actions(order):
        kinds[action.stage, action.microbatch].append(action.kind)
    for rank, actions in enumerate(order):
        for stage in sorted({action.stage for action in actions}):
            numbers = range(microbatch_count(order))
            wrong = (m for m in numbers if not _is_whole(kinds.get((stage, m), [])))
            microbatch = next(wrong, None)
            if microbatch is not None:
                yield _of_step(stage, microbatch, kinds.get((stage, microbatch), []), rank)


def _is_whole(kinds: list[ActionKind]) -> bool:
    return sorted(kinds) in (
        sorted([FORWARD, BACKWARD]),
        sorted([FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT]),
    )


def _of_step(stage: int, microbatch: int, kinds: list[ActionKind], rank: int) -> OrderMistake:
    """What is wrong with one stage's actions for one microbatch."""

    def named(kind: ActionKind) -> Action:
        return Action(kind, stage, microbatch)

    counts = Counter(kinds)
    twice = next((kind for kind in counts if counts[kind] > 1), None)
    if twice is not None:
        return OrderMistake(f"{named(twice)} is there twice", "remove one of the two", rank, named(twice))
    at = named(kinds[0]) if kinds else None
    whole, halves = named(BACKWARD), (named(BACKWARD_INPUT), named(BACKWARD_WEIGHT))
    if FORWARD not in counts:
        help_text = f"stage {stage} runs every microbatch that another stage runs: add {named(FORWARD)}"
        return OrderMistake(f"{named(FORWARD)} is missing", help_text, rank, at)
    if BACKWARD in counts:
        also = next(half for half in halves if half.kind in counts)
        help_text = f"write {whole}, or {halves[0]} and later {halves[1]}"
        return OrderMistake(f"{whole} and {also} run the same backward", help_text, rank, also)
    present = next((half for half in halves if half.kind in counts), None)
    if present is not None:
        other = halves[1] if present == halves[0] else halves[0]
        return OrderMistake(f"{present} is there without {other}", f"add {other}", rank, present)
    help_text = f"add {whole}, or {halves[0]} and later {halves[1]}"
    return OrderMistake(f"the backward {whole} is missing", help_text, rank, at)
