"""The replay against closed forms from the papers, and against longest paths in a graph of everything that waits."""

from __future__ import annotations

import random
from itertools import pairwise

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.language.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Order,
    parse_actions,
    stage_ranks,
)
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.replay import ActionCosts, StuckOrder, replay
from parallelizer.language.pipeline.settings import Pipeline, order_of


def order(*rows: str) -> Order:
    return tuple(tuple(a for cell in row.split() for a in parse_actions(cell)) for row in rows)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (8, 16), (8, 32)])
def test_bubbles_are_those_of_the_papers(ranks: int, count: int) -> None:
    """With p ranks, m microbatches, v stages a rank and equal F, I and W: arXiv:2104.04473 has (p - 1) / (v m + p - 1),
    and arXiv:2401.10241 a bubble of (p - 1) (F + I - W) for ZB-H1 of one stage a rank.
    """

    def bubble(name: str, stages: int | None = None) -> float:
        return replay(order_of(Pipeline(name, count, stages), ranks)).bubble

    p, m = ranks, count
    assert bubble("gpipe") == bubble("1f1b") == pytest.approx((p - 1) / (m + p - 1))
    for stages in (2, 4):
        assert bubble("interleaved-1f1b", stages) == pytest.approx((p - 1) / (stages * m + p - 1))
    for stages in (1, 2):
        assert bubble("interleaved-zero-bubble", stages) == pytest.approx((p - 1) / (3 * stages * m + p - 1))
    assert bubble("zbv") == pytest.approx((p - 1) / (6 * m + p - 1))


def test_the_figures_for_8_ranks_and_16_microbatches() -> None:
    """As the page on pipelines says. In DualPipeV each pair is two actions here, not one."""
    found = {}
    for name, stages in (
        ("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4), ("interleaved-zero-bubble", 2),
        ("zbv", 2), ("dualpipev", 2),
    ):  # fmt: skip
        timed = replay(order_of(Pipeline(name, 16, stages), 8))
        found[name, stages] = round(100 * timed.bubble, 1), max(map(timed.peak, range(8)))
    assert found == {
        ("gpipe", 1): (30.4, 16),
        ("1f1b", 1): (30.4, 8),
        ("interleaved-1f1b", 2): (17.9, 23),
        ("interleaved-1f1b", 4): (9.9, 39),
        ("interleaved-zero-bubble", 2): (6.8, 16),
        ("zbv", 2): (6.8, 16),
        ("dualpipev", 2): (6.8, 17),
    }


def graph_of(order: Order, costs: ActionCosts) -> networkx.DiGraph:
    """Actions and messages, with an edge from each to what waits for it. A node's `takes` is its duration."""
    lies, graph = stage_ranks(order), networkx.DiGraph()
    last: dict[object, object] = {}

    def node(key: object, takes: float, *after: object) -> None:
        graph.add_node(key, takes=takes)
        graph.add_edges_from((other, key) for other in after if other is not None)

    for rank, actions in enumerate(order):
        for action in actions:
            node(action, costs.of(action), last.get(rank))
            last[rank] = action
            step = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: -1}.get(action.kind)
            if step is not None and 0 <= action.stage + step < len(lies):
                to = lies[action.stage + step]
                sent = ("message", step, action.stage, action.microbatch)
                takes = costs.transfer.get((action.stage, action.stage + step), 0) if to != rank else 0
                channel = (rank, to, step)
                node(sent, takes, action, last.get(channel) if to != rank else None)
                last[channel] = sent
    for actions in order:
        for action in actions:
            s, m = action.stage, action.microbatch
            if action.kind is FORWARD:
                needs = [("message", 1, s - 1, m)] if s else []
            elif action.kind is BACKWARD_WEIGHT:
                needs = [Action(BACKWARD_INPUT, s, m)]
            else:
                needs = [Action(FORWARD, s, m), *([("message", -1, s + 1, m)] if s + 1 < len(lies) else [])]
            graph.add_edges_from((need, action) for need in needs)
    return graph


def ends(graph: networkx.DiGraph) -> dict[object, float]:
    """The end of every node: the longest path to it."""
    found: dict[object, float] = {}
    for node in networkx.topological_sort(graph):
        found[node] = (
            max((found[other] for other in graph.predecessors(node)), default=0) + graph.nodes[node]["takes"]
        )
    return found


@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_times_are_longest_paths_and_a_circle_is_stuck(
    name: str, ranks: int, stages: int, count: int, swaps: int, chance: random.Random
) -> None:
    """The order of a schedule is never stuck. Some with swapped actions are."""
    if SCHEDULES[name].misfit(ranks, stages, count) is not None:
        return
    rows = [list(row) for row in SCHEDULES[name].order(ranks, stages, count)]
    for _ in range(swaps):
        row = chance.choice(rows)
        a, b = chance.randrange(len(row)), chance.randrange(len(row))
        row[a], row[b] = row[b], row[a]
    swapped = tuple(map(tuple, rows))

    def durations() -> tuple[float, ...]:
        return tuple(chance.randint(1, 9) for _ in range(ranks * stages))

    edges = {(s + a, s + b): chance.randint(0, 5) for s in range(ranks * stages) for a, b in ((0, 1), (1, 0))}
    costs = ActionCosts(durations(), durations(), durations(), edges)
    graph = graph_of(swapped, costs)
    if networkx.is_directed_acyclic_graph(graph):
        timed = replay(swapped, costs)
        expected = ends(graph)
        assert {one.action: one.end for rank in timed.ranks for one in rank} == {
            action: end for action, end in expected.items() if isinstance(action, Action)
        }
        for rank in timed.ranks:
            assert all(a.end <= b.start for a, b in pairwise(rank))
            assert all(one.end - one.start == costs.of(one.action) for one in rank)
    else:
        assert swaps
        with pytest.raises(StuckOrder):
            replay(swapped, costs)


def test_a_message_waits_until_those_sent_before_it_have_passed() -> None:
    costs = ActionCosts((1, 1), (1, 1), (0, 0), {(0, 1): 10})
    [_, last] = replay(order("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), costs).ranks
    # The two outputs leave at 1 and 2; the channel is busy until 11, so the second arrives at 21.
    assert [(str(one.action), one.start) for one in last] == [
        ("1F0", 11),
        ("1B0", 12),
        ("1F1", 21),
        ("1B1", 22),
    ]


def test_messages_between_stages_of_one_rank_take_no_time() -> None:
    costs = ActionCosts((1, 1), (1, 1), (1, 1), {(0, 1): 10, (1, 0): 10})
    assert replay(order("0F0 1F0 1B0 0B0"), costs).length == 6


def test_live_microbatches_count_from_the_forward_to_the_backward_for_weights() -> None:
    timed = replay(order("0F0 0F1 0I0 0I1 0W0 0W1"))
    assert timed.live(0) == ((0, 1), (1, 2), (5, 1), (6, 0))
    assert timed.peak(0) == 2
    assert timed.bubble == 0


def test_a_circle_says_which_rank_waits_for_what() -> None:
    with pytest.raises(StuckOrder) as caught:
        replay(order("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"))
    assert str(caught.value) == "rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank 0"


def test_an_action_that_no_rank_or_the_same_rank_runs_later_is_waited_for() -> None:
    with pytest.raises(StuckOrder, match="rank 0 waits at 0B0 for 0F0 of itself"):
        replay(order("0B0 0F0"))
    with pytest.raises(StuckOrder, match="rank 0 waits at 0W0 for 0B0 of no rank"):
        replay(order("0F0 0W0"))


def test_the_circle_leaves_out_ranks_that_only_wait_for_it() -> None:
    with pytest.raises(StuckOrder) as caught:
        replay(order("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B1 2B0 2F1"))
    assert [wait.rank for wait in caught.value.waits] == [0, 1, 2]
    assert str(caught.value) == "rank 2 waits at 2B1 for 2F1 of itself"
    with pytest.raises(StuckOrder) as caught:
        replay(order("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2B1 2F0 2B0"))
    assert [wait.rank for wait in caught.value.circle] == [1, 2]
