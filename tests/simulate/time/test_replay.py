"""Queues against lines whose times are known, and what holds for all lines."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.language.plan import Mesh
from parallelizer.simulate.record.operators import Issued, Moment, Wait
from parallelizer.simulate.time.constants import Constants
from parallelizer.simulate.time.price import Habits, Prices
from parallelizer.simulate.time.replay import COMPUTE, WAIT, Replayed, replay
from tests.simulate.time.lines import MESH, collective, gathered, machine, memory

PLAIN = Constants(memory=1.0, contention=0.0)
SECOND = int(1e12)  # bytes that the memory moves in a second
GATHER = 400_000_000_000 // 3  # bytes whose gather over four ranks takes a second


def run(
    line: list[Moment], constants: Constants = PLAIN, habits: Habits | None = None, **changes: object
) -> Replayed:
    return replay(line, Prices(machine(**changes), MESH, constants, habits))


def waited(done: Replayed) -> float:
    return sum(span.waited for span in done.spans)


def test_operators_run_one_after_another() -> None:
    assert run([memory(SECOND), memory(2 * SECOND)]).seconds == pytest.approx(3.0)


def test_gathers_are_hidden_behind_the_layer_before_except_the_first() -> None:
    done = run(gathered(4, GATHER // 2, SECOND))
    assert done.seconds == pytest.approx(4.5, rel=1e-6)
    assert waited(done) == pytest.approx(0.5, rel=1e-6)


def test_gathers_that_take_longer_than_a_layer_set_the_pace() -> None:
    assert run(gathered(4, 2 * GATHER, SECOND)).seconds == pytest.approx(9.0, rel=1e-6)


def test_two_gathers_may_be_ahead_of_the_computation_in_forward_and_one_in_backward() -> None:
    """While the long first layer runs, the gathers of the next two are made; in backward the second waits for a copy."""
    forward = [*gathered(1, GATHER, 3 * SECOND), *gathered(2, GATHER, SECOND // 10)]
    assert run(forward).seconds == pytest.approx(1 + 3 + 0.2, rel=1e-6)
    backward = [
        dataclasses.replace(m, entry=dataclasses.replace(m.entry, phase="backward"))
        if isinstance(m, Issued)
        else dataclasses.replace(m, phase="backward")
        for m in forward
    ]
    assert run(backward).seconds == pytest.approx(1 + 3 + 0.1 + 0.9 + 0.1, rel=1e-6)


def test_without_streams_everything_runs_in_turn() -> None:
    assert run(gathered(4, GATHER, SECOND), streams=False).seconds == pytest.approx(8.0, rel=1e-6)


def test_a_collective_of_a_style_is_waited_for_where_the_line_says_so() -> None:
    issued = Issued(collective("all_gather", GATHER, "tp", ranks=4), False)
    between = [issued, memory(SECOND // 2), Wait("forward", "", 1), memory(SECOND)]
    done = run(between)
    assert done.seconds == pytest.approx(2.0, rel=1e-6)
    assert [span.axis for span in done.spans if span.waited] == ["tp"]
    assert run([dataclasses.replace(issued, waits=True), memory(SECOND)]).seconds == pytest.approx(
        2.0, rel=1e-6
    )


def test_the_reduction_before_is_waited_for_at_the_next_and_the_last_at_the_end_of_backward() -> None:
    def layer() -> list[Moment]:
        return [
            memory(SECOND, "backward"),
            Issued(collective("reduce_scatter", 2 * GATHER, phase="backward"), True),
        ]

    done = run([*layer(), *layer(), memory(SECOND, "optimizer")])
    # A second of layer 1, two of its reduction, which layer 2's own waits for; two of that, and one of the optimizer.
    assert done.seconds == pytest.approx(6.0, rel=1e-6)


def test_an_operator_beside_a_collective_is_slower_by_the_contention() -> None:
    line = [Issued(collective("all_gather", GATHER), True), memory(2 * SECOND)]
    # The first second of the gather does four fifths of a second's work.
    assert run(line, dataclasses.replace(PLAIN, contention=0.2)).seconds == pytest.approx(2.2, rel=1e-6)


def test_a_host_that_is_slower_than_the_device_sets_the_pace() -> None:
    done = run([memory(SECOND // 10), memory(SECOND // 10)], host_seconds=1.0)
    assert done.seconds == pytest.approx(2.1)
    assert {span.axis for span in done.spans if span.waited} == {"host"}


def test_collectives_over_tp_in_pieces_run_beside_the_products_around_them() -> None:
    tp = Issued(collective("reduce_scatter", GATHER, "tp", ranks=4), False)
    line: list[Moment] = [tp, Wait("forward", "", 1), memory(SECOND), memory(SECOND)]
    assert run(line).seconds == pytest.approx(3.0, rel=1e-6)
    assert run(line, habits=Habits(overlapped_tp=True)).seconds == pytest.approx(2.0, rel=1e-6)


ENTRIES = st.one_of(
    st.builds(memory, st.integers(0, SECOND), st.sampled_from(["forward", "backward"]), copies=st.sampled_from(["", "out"])),
    st.builds(
        lambda kind, payload, unit, waits: Issued(collective(kind, payload), unit, waits),
        st.sampled_from(["all_gather", "reduce_scatter"]), st.integers(1, GATHER), st.booleans(), st.booleans(),
    ),
    st.builds(Wait, st.just("forward"), st.just(""), st.integers(1, 3)),
)  # fmt: skip


@given(st.lists(ENTRIES, max_size=30), st.sampled_from([0.0, 0.3]))
def test_a_replay_never_beats_its_critical_path_and_no_queue_runs_two_at_once(
    line: list[Moment], contention: float
) -> None:
    prices = Prices(machine(), MESH, dataclasses.replace(PLAIN, contention=contention))
    done = replay(line, prices)
    work = sum(prices.operator(m) for m in line if not isinstance(m, Issued | Wait))
    units = sum(prices.collective(m) for m in line if isinstance(m, Issued) and m.unit)
    alone = [prices.collective(m) for m in line if isinstance(m, Issued)]
    assert done.seconds >= max([work, units, *alone]) * (1 - 1e-9)
    assert done.seconds <= (work / (1 - contention) + sum(alone)) * (1 + 1e-9)
    lanes: dict[str, float] = {}
    for span in done.spans:
        if span.queue == COMPUTE:
            assert span.start >= lanes.get(COMPUTE, 0.0) - 1e-12
            lanes[COMPUTE] = span.end
    standing = sum(s.waited for s in done.spans if s.queue in (COMPUTE, WAIT))
    computing = sum(s.seconds for s in done.spans if s.queue == COMPUTE)
    assert standing + computing <= done.seconds * (1 + 1e-9)


@given(st.lists(ENTRIES, max_size=30))
def test_more_bandwidth_is_never_slower(line: list[Moment]) -> None:
    slow = replay(line, Prices(machine(), MESH, PLAIN)).seconds
    for key in ("memory", "node", "network"):
        fast = dataclasses.replace(machine(), **{key: 2 * getattr(machine(), key)})
        assert replay(line, Prices(fast, MESH, PLAIN)).seconds <= slow * (1 + 1e-9)


def longest_path(line: list[Moment]) -> float:
    """The longest chain of moments that need each other, as if every queue had room for all at once."""
    prices = Prices(machine(), MESH, PLAIN)
    computed = 0.0
    gathers: list[float] = []
    issued: list[float] = []
    for moment in line:
        if isinstance(moment, Wait):
            if moment.back <= len(issued):
                computed = max(computed, issued[-moment.back])
        elif isinstance(moment, Issued):
            begins = 0.0 if moment.unit and moment.entry.kind == "all_gather" else computed
            issued.append(begins + prices.collective(moment))
            if moment.unit and moment.entry.kind == "all_gather":
                gathers.append(issued[-1])
            elif moment.waits and not moment.unit:
                computed = max(computed, issued[-1])
        else:
            if moment.copies == "out" and gathers:
                computed = max(computed, gathers.pop(0))
            computed += prices.operator(moment)
    return max([computed, *issued])


@given(st.lists(ENTRIES, max_size=30))
def test_a_replay_never_beats_its_longest_chain_of_dependencies(line: list[Moment]) -> None:
    assert replay(line, Prices(machine(), MESH, PLAIN)).seconds >= longest_path(line) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("kind", "axis", "phase", "seconds"),
    [("all_gather", "tp", "forward", 0.5), ("all_to_all", "ep", "backward", 0.25), ("send", "pp", "forward", 0.0),
     ("all_reduce", "tp", "clip", 0.0)],
)  # fmt: skip
def test_asking_for_a_collective_takes_the_host_s_time(
    kind: str, axis: str, phase: str, seconds: float
) -> None:
    """On processors it is added to the collective, for as many ranks as share one; on a GPU the host is late by it."""
    rates = {"redistribute_seconds": 0.5, "exchange_seconds": 0.25}
    line: list[Moment] = [Issued(collective(kind, 0, axis, phase), False, True)]
    free = run(line, streams=False, cores=2).seconds
    assert run(line, streams=False, cores=2, **rates).seconds == pytest.approx(free + 2 * seconds, rel=1e-3)
    late = [*line, memory(0, phase)]
    assert run(late, **rates).seconds == pytest.approx(run(late).seconds + seconds, abs=1e-3)


@pytest.mark.parametrize(("ranks", "late"), [(2, 0.5), (4, 0.0)])
def test_ranks_that_have_processors_of_their_own_wait_for_those_that_come_late(
    ranks: int, late: float
) -> None:
    """More ranks than processors wait for each other in any case: what was measured has it."""
    one = Issued(collective("all_gather", 0, "tp", "forward", ranks=ranks), False, True)
    two = machine(streams=False, cores=2, skew_seconds=0.5)
    assert Prices(two, Mesh({"tp": 2}), PLAIN).asking(one) == late


@pytest.mark.parametrize(
    ("axis", "unit", "phase", "seconds"),
    [("cp", False, "forward", 4.0), ("cp", False, "clip", 1.0), ("cp", True, "forward", 1.0), ("tp", False, "forward", 1.0)],
)  # fmt: skip
def test_what_attention_sends_over_cp_grows_with_repeated_heads(
    axis: str, unit: bool, phase: str, seconds: float
) -> None:
    one = Issued(collective("all_gather", GATHER, axis, phase), unit, True)
    found = Prices(machine(), MESH, PLAIN, Habits(cp_payload=4.0)).collective(one)
    assert found == pytest.approx(seconds, rel=1e-3)
