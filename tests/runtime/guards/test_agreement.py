"""What ranks say to each other once a step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from parallelizer.runtime.guards.agreement import Agreement, Verdict, minority, out_of_step
from parallelizer.runtime.launch.failures import LaunchError
from tests.ranks import run_ranks


def test_one_rank_hears_itself() -> None:
    agreement = Agreement()
    agreement.tell(3, stop=15, position=("epoch", 1))
    assert agreement.heard() == Verdict(15)


def test_tell_and_heard_take_turns() -> None:
    agreement = Agreement()
    with pytest.raises(RuntimeError, match="before tell"):
        agreement.heard()
    agreement.tell(1)
    with pytest.raises(RuntimeError, match="called twice"):
        agreement.tell(2)


def worker() -> dict[str, Any]:
    rank = dist.get_rank()
    agreement = Agreement(timeout=20)
    said = {
        "alike": {"step": 1, "position": 64},
        "one is told to stop": {"step": 2, "stop": 10 if rank == 2 else 0},
        "one is ahead": {"step": 4 if rank == 3 else 3},
        "two and two": {"step": 4 + rank // 2},
        "one reads other data": {"step": 5, "position": 100 - (rank == 1)},
        "all apart": {"step": 6 + rank},
        "alike again": {"step": 9},
    }
    heard: dict[str, Any] = {}
    for name, words in said.items():
        agreement.tell(**words)  # type: ignore[arg-type]
        heard[name] = agreement.heard()
    short = Agreement(timeout=1)
    short.tell(0)  # the first one makes the group
    short.heard()
    if rank != 1:
        short.tell(1)
        begun = time.monotonic()
        try:
            short.heard()
        except LaunchError as error:
            heard["gone"] = (error.message, time.monotonic() - begun)
    else:
        time.sleep(1.5)
    return heard


@pytest.mark.ranks
def test_every_rank_hears_the_same_and_who_is_apart() -> None:
    ranks = run_ranks(worker, 4)
    gone = [heard.pop("gone", None) for heard in ranks]
    assert all(heard == ranks[0] for heard in ranks)
    heard = ranks[0]
    assert heard["alike"] == heard["alike again"] == Verdict()
    assert heard["one is told to stop"] == Verdict(10)
    assert heard["one is ahead"].out_of_step == (3,) and heard["one is ahead"].steps == (3, 3, 3, 4)
    assert heard["two and two"].out_of_step == (0, 1, 2, 3) == heard["all apart"].out_of_step
    assert heard["one reads other data"].out_of_step == (1,)
    told = {name: found.message for name, one in heard.items() if (found := out_of_step(one))}
    assert told == {
        "one is ahead": "rank 3 is at step 4, the other 3 at step 3",
        "two and two": "ranks 0, 1 are at step 4; ranks 2, 3 are at step 5",
        "one reads other data": "in step 5 rank 1 reads other data than the other 3",
        "all apart": "rank 0 is at step 6; rank 1 is at step 7; rank 2 is at step 8; rank 3 is at step 9",
    }
    for rank in (0, 2, 3):
        message, seconds = gone[rank]
        assert "after step 1" in message and seconds < 10


def read_late() -> list[Any]:
    """The words of a second step are made before those of the first are read."""
    agreement, rank = Agreement(), dist.get_rank()
    told = [agreement.words(3 + rank), agreement.words(7)]
    for words in told:
        dist.all_reduce(words, dist.ReduceOp.MAX)
    return [agreement.read(words.tolist()) for words in told]


@pytest.mark.ranks
def test_words_are_read_in_the_order_in_which_they_were_made() -> None:
    first = Verdict(0, (0, 1), (3, 4), (0, 0))
    assert run_ranks(read_late, 2) == [[first, Verdict()]] * 2


@pytest.mark.parametrize(
    ("said", "apart"),
    [
        ("aaab", (3,)),
        ("baaa", (0,)),
        ("aabb", (0, 1, 2, 3)),
        ("abc", (0, 1, 2)),
        ("ab", (0, 1)),
        ("aabac", (2, 4)),
        ("aaa", ()),
    ],
)
def test_the_minority_is_whoever_is_not_with_more_than_half(said: str, apart: tuple[int, ...]) -> None:
    assert minority(said) == apart
