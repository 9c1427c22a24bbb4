"""The step of a stage: a few microbatches stand for all, and real ranks send what is planned."""

from __future__ import annotations

import pytest

from parallelizer.child.children import in_children
from parallelizer.configuration.setup import Setup
from parallelizer.simulate.record import trace
from parallelizer.simulate.record.memory import MemoryChange
from parallelizer.simulate.record.trace import Recording, record
from tests.chosen import chosen
from tests.simulate.real_ledger import real_ledgers
from tests.simulate.setups import llama, traced

SMALL = ("model.n_layers=4", "train.batch_size=16", "train.seq_len=16", "parallel.pipeline.microbatches=8")
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev")


def small(preset: str, schedule: str, *more: str) -> Setup:
    return llama(f"parallel={preset}", f"parallel.pipeline.schedule={schedule}", *SMALL, *more)


def recorded(setup: Setup, rank: int) -> Recording:
    model = setup.build_model()
    return record(setup.compile(model), model, setup.recipe(), rank)


def recorded_whole(setup: Setup, rank: int) -> Recording:
    """With every microbatch run, and nothing put together."""
    trace.sample = lambda pipeline: tuple(range(8))  # type: ignore[attr-defined]
    trace.few_parts = lambda parts: parts  # type: ignore[attr-defined]
    trace.pieces_of = lambda lists, _: lists  # type: ignore[attr-defined]
    trace.whole_step = lambda lists, *_: lists  # type: ignore[attr-defined]
    return recorded(setup, rank)


def changes(one: Recording) -> list[MemoryChange]:
    """Without single numbers, which Python's garbage collector frees at one moment or another."""
    return [change for change in one.changes if abs(change.delta) > 64]


@pytest.mark.parametrize("schedule", chosen(SCHEDULES, ("interleaved-1f1b",)))
def test_a_few_microbatches_stand_for_all(schedule: str) -> None:
    setup = small("pp2", schedule)
    calls = [(function, setup, rank) for rank in (0, 1) for function in (recorded, recorded_whole)]
    of_first, first, of_last, last = in_children(calls)
    for few, whole in ((of_first, first), (of_last, last)):
        assert few.ledger == whole.ledger
        assert few.before == whole.before
        assert changes(few) == changes(whole)


HALVES = ("1f1b", "zbv", "dualpipev")


@pytest.mark.parametrize("schedule", chosen(HALVES, ("zbv",)))
def test_a_few_microbatches_in_16_bits_stand_for_all(schedule: str) -> None:
    """In 16 bits a step's second halves of backwards hold what those in 32 bits do not."""
    setup = small("pp2", schedule, "train.dtype=bfloat16")
    few, whole = in_children([(recorded, setup, 1), (recorded_whole, setup, 1)])
    assert few.ledger == whole.ledger
    assert changes(few) == changes(whole)


@pytest.mark.parametrize("preset", chosen(("pp2_fsdp2", "pp2_cp2"), ()))
def test_a_few_parts_stand_for_all_that_are_accumulated(preset: str) -> None:
    setup = small(preset, "1f1b", "train.batch_size=64", "train.accumulate=4")
    few, whole = in_children([(recorded, setup, 0), (recorded_whole, setup, 0)])
    assert few.ledger == whole.ledger
    assert changes(few) == changes(whole)


def test_ranks_with_like_stages_have_the_peaks_of_their_own_traces() -> None:
    setup = llama("parallel=pp4", "model.n_layers=10", "parallel.pipeline.balance=[2, 3, 3, 2]", *SMALL[1:])
    first, second = in_children([(recorded, setup, 1), (recorded, setup, 2)])
    assert set(first.stage_ranks) == set(second.stage_ranks) == {1, 2}
    assert first.stage_ranks == second.stage_ranks
    assert first.stage_ranks[1][0] > first.stage_ranks[2][0]  # it holds more microbatches


CELLS = [
    ("pp2", "1f1b"),
    ("pp2", "zbv"),
    ("pp2_tp2", "1f1b"),
    ("pp2_fsdp2", "interleaved-1f1b"),
    ("pp2_cp2", "gpipe"),
    ("pp2_fsdp2_tp2", "interleaved-zero-bubble"),
]


@pytest.mark.parametrize("cell", chosen(CELLS, (CELLS[1], CELLS[3])))
def test_real_ranks_send_what_is_planned(cell: tuple[str, str]) -> None:
    preset, schedule = cell
    setup = small(preset, schedule, "parallel.pipeline.microbatches=4")
    [by_rank] = real_ledgers([setup])
    for rank in (0, setup.mesh.world_size - 1):
        assert traced(setup, rank).ledger == by_rank[rank]


@pytest.mark.parametrize("schedule", chosen(SCHEDULES, ("interleaved-zero-bubble",)))
def test_checkpoints_of_a_stage_run_again_under_the_device_s_attention(schedule: str) -> None:
    """The kernels of CUDA's attention keep other tensors than those of a CPU: a recomputation has to choose alike."""
    setup = small("pp2", schedule, "device=cuda", 'rules=["layers.*: checkpoint"]')
    assert traced(setup).memory.peak > 0
