"""Classes with another number of ranks of ep, derived from two that were traced: they are what a trace of them is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelizer.propose.search.candidate import FULL, Candidate
from parallelizer.propose.search.class_trace import ClassTrace, Spot
from parallelizer.propose.search.classes import TracedClasses
from parallelizer.propose.search.estimate import Estimates
from parallelizer.propose.search.other_ep import NotAlike, between, with_other_ep
from parallelizer.propose.search.task import SearchTask, read_task
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.operators import GEMM, Issued, Operator, Wait

OVERRIDES = ("model=hf_qwen3_moe", "hardware=h100", "gpus=16", "train.seq_len=136", "train.batch_size=64",
             "++model.config.num_hidden_layers=8", "++model.config.num_experts=16")  # fmt: skip


def _key(ep: int, **other: int) -> Candidate:
    return replace(Candidate(ep=ep), **other).trace_class  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_derived_class_has_the_time_and_the_memory_of_its_trace(tp: int) -> None:
    task: SearchTask = read_task(OVERRIDES)
    classes = TracedClasses(task.base, lambda _: None)
    eps = [4, 8, 16]
    classes.trace([_key(ep, tp=tp) for ep in eps])
    assert classes.count == 2 and len(classes.traces) == 3
    derived = classes.traces.pop(_key(8, tp=tp))
    classes._trace_each([_key(8, tp=tp)])
    traced = classes.traces[_key(8, tp=tp)]
    assert [type(moment) for moment in derived.line] == [type(moment) for moment in traced.line]
    for one, other in zip(derived.line, traced.line, strict=True):
        if isinstance(one, Operator) and isinstance(other, Operator):
            assert one.sizes == (other.sizes and pytest.approx(other.sizes, rel=0.05))  # rows are rounded
            assert one.moved == pytest.approx(other.moved, rel=0.05)
        if isinstance(one, Issued) and isinstance(other, Issued):
            assert (one.entry.kind, one.entry.ranks) == (other.entry.kind, other.entry.ranks)
            # Shards of small parameters are padded.
            assert one.entry.payload_bytes == pytest.approx(other.entry.payload_bytes, rel=0.02, abs=2)
            assert one.entry.wire_bytes == pytest.approx(other.entry.wire_bytes, rel=0.02, abs=2)
    for rows in (1, 4):
        candidate = Candidate(dp_shard=16 // tp, tp=tp, ep=8, rows=rows)
        made, real = (
            Estimates(task.machine, {_key(8, tp=tp): trace}).of(candidate) for trace in (derived, traced)
        )
        assert made.seconds == pytest.approx(real.seconds, rel=0.001)
        assert made.peak == pytest.approx(real.peak, rel=0.01)


def _class_of(ep: int) -> ClassTrace:
    """Of 64 experts and 96 rows, with sizes of each kind."""
    product = Operator("forward", "experts", GEMM, "_grouped_mm", "bfloat16", 1000 + 6400 // ep,
                       sizes=(64 // ep, 96 * ep, 32, 16))  # fmt: skip
    sent = Collective("forward", "all_to_all", "ep", ep, 640, 640 * (ep - 1) // ep, "bfloat16", "experts",
                      ("experts", "plan.yaml", 3), False)  # fmt: skip
    spots = (Spot("forward", 0.0, {"parameters": 128 // ep, "activations": 70}, 1),)
    line = (product, Issued(sent, unit=False), Wait("forward", "experts", 1))
    return ClassTrace(line, 1, 8, 2 * ep, None, 0, (3, 5), spots, 17, frozenset({"experts"}), frozenset({16}))


@pytest.mark.parametrize("ep", [4, 8, 16])
def test_what_is_constant_grows_or_falls_is_found(ep: int) -> None:
    assert with_other_ep(_class_of(2), _class_of(32), (2, 32), ep) == _class_of(ep)


def test_classes_that_differ_in_more_than_sizes_are_refused() -> None:
    fewer, more = _class_of(2), _class_of(32)
    product = more.line[0]
    assert isinstance(product, Operator)
    for other in (
        replace(more, line=more.line[1:]),
        replace(more, line=(replace(product, name="bmm"), *more.line[1:])),
        replace(more, line=(replace(product, sizes=None), *more.line[1:])),
        replace(more, line=more.line[::-1]),
        replace(more, spots=(replace(more.spots[0], use={"parameters": 4}),)),
    ):
        with pytest.raises(NotAlike):
            with_other_ep(fewer, other, (2, 32), 8)


def test_a_class_lies_between_two_that_differ_in_ep_alone() -> None:
    wanted = [_key(ep) for ep in (1, 2, 4, 8)]
    assert between(wanted, ()) == {_key(4): (_key(2), _key(8))}
    assert between([_key(4)], [_key(2), _key(8), _key(16)]) == {_key(4): (_key(2), _key(16))}
    assert between([_key(4)], [_key(2), _key(8, cp=2)]) == {}
    # Experts that are shared out among ranks of tp alone have no shards of their own.
    assert between([_key(ep, tp=4) for ep in (2, 4, 8, 16, 32)], ()) == {
        _key(16, tp=4): (_key(8, tp=4), _key(32, tp=4))
    }
    assert between([replace(Candidate(ep=ep), checkpoint=FULL).trace_class for ep in (2, 4, 8)], ()) == {}
