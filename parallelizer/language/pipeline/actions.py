"""The actions of a pipeline schedule, and their text as PyTorch writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class ActionKind(StrEnum):
    """What a rank computes. A backward is either one BACKWARD, or a BACKWARD_INPUT and later a BACKWARD_WEIGHT."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = ActionKind
SENDS_GRADIENT = (BACKWARD, BACKWARD_INPUT)
"""Kinds that compute the gradient of the stage's input, which the stage before receives."""


@dataclass(frozen=True)
class Action:
    """One computation of one stage for one microbatch. Both count from 0."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = tuple[tuple[Action, ...], ...]
"""The actions of each rank of the axis pp, in the order in which the rank runs them."""

IGNORED = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")
"""Actions in PyTorch's files that follow from the others: communication, and FSDP's gathers and reductions."""

_ACTION = re.compile(rf"(\d{{1,6}})(?:([FBIW])(\d{{1,6}})|(?:{'|'.join(IGNORED)})\d{{0,6}})", re.ASCII)
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def parse_actions(text: str) -> tuple[Action, ...]:
    """The actions that one cell of PyTorch's text form names. Raises ValueError for another text.

    `2F0` is one action. `(8F1;7B0)OVERLAP_F_B` is two, one after the other. An empty cell is a wait. It and the
    kinds of `IGNORED` are no actions.
    """
    text = text.strip()
    overlapped = _OVERLAPPED.fullmatch(text)
    cells = overlapped[1].split(";") if overlapped else [text] if text else []
    actions = []
    for cell in cells:
        found = _ACTION.fullmatch(cell.strip())
        if found is None:
            raise ValueError(f"{cell.strip()!r} is not an action")
        if found[2]:
            actions.append(Action(ActionKind(found[2]), int(found[1]), int(found[3])))
    return tuple(actions)


def order_text(order: Order) -> str:
    """The order as the CSV text of PyTorch's `_dump_csv`: a line for each rank."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in order)


def all_actions(order: Order) -> Iterator[Action]:
    """Every action of every rank."""
    return (action for actions in order for action in actions)


def stage_ranks(order: Order) -> tuple[int, ...]:
    """The rank of each stage. Raises ValueError if a stage lies on no rank or on several."""
    found: dict[int, int] = {}
    for rank, actions in enumerate(order):
        for action in actions:
            if found.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"stage {action.stage} lies on rank {found[action.stage]} and on rank {rank}"
                )
    missing = next((stage for stage in range(len(found)) if stage not in found), None)
    if missing is not None:
        raise ValueError(f"stage {missing} lies on no rank")
    return tuple(found[stage] for stage in range(len(found)))


def microbatch_count(order: Order) -> int:
    """The number of microbatches of an order."""
    return 1 + max((action.microbatch for action in all_actions(order)), default=-1)


def stages_of(ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """The stages on a rank, by the rank of each stage."""
    return tuple(stage for stage, other in enumerate(ranks) if other == rank)
