"""Every class of ranks is traced, or said to hold no more than one that was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry, Workload
from parallelizer.simulate.record import trace_classes as module
from parallelizer.simulate.record.memory import Usage
from parallelizer.simulate.record.trace import Recipe, Trace, trace
from parallelizer.simulate.record.trace_classes import trace_classes, worst
from tests.findings import compiled, on_meta
from tests.simulate.setups import llama, setup_of

ODD = ("parallel=fsdp4", "model.vocab_size=257")  # 65 rows on three ranks, 62 on the last


class Attends(nn.Module):
    """One attention under a linear."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.inner = Inner(causal)
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.up(x).unflatten(-1, (2, 4)).transpose(1, 2))


class Inner(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=self.causal)


def mean_square(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return output.square().sum(), torch.tensor(output.numel())


def attending(*, causal: bool) -> Trace:
    text = """version: 1
rules: {inner: context-parallel, "": fsdp}
buffers: {batch: {x: 1}}
"""
    model = on_meta(lambda: Attends(causal))
    workload = Workload({"x": Entry(("batch", "sequence", 8), "float32")}, 2, 32)
    program = compiled(text, lambda: model, Mesh({"cp": 2, "dp_shard": 2}), workload=workload)
    recipe = Recipe(workload, mean_square, lambda m: torch.optim.AdamW(m.parameters(), fused=True), None)
    return trace_classes(program, model, recipe)


def test_ranks_that_hold_less_are_traced_as_themselves() -> None:
    setup = llama(*ODD)
    model = setup.build_model()
    program = setup.compile(model)
    found = trace_classes(program, model, setup.recipe())
    assert [(c.rank, c.ranks) for c in found.classes] == [(0, 3), (3, 1)]
    last = trace(program, model, setup.recipe(), 3)
    assert found.classes[1].peak == last.memory.peak < found.memory.peak == found.classes[0].peak
    assert found.classes[1].sent_bytes == sum(e.wire_bytes for e in last.ledger)
    less = 2 * 3 * 64 * 4  # three rows of the embeddings and of the output
    assert found.classes[0].parameters_bytes - found.classes[1].parameters_bytes == less


def test_parts_of_a_sequence_differ_only_under_a_causal_mask() -> None:
    causal, whole = attending(causal=True), attending(causal=False)
    assert [(c.rank, c.ranks) for c in causal.classes] == [(0, 2), (1, 2)]
    assert [(c.rank, c.ranks) for c in whole.classes] == [(0, 4)]
    assert whole.classes[0].peak == whole.memory.peak


def test_of_many_classes_those_that_hold_most_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    @contextmanager
    def ranks(
        program: Any, model: Any, recipe: Any, ranks: Sequence[int], *, fold: bool, shared: None
    ) -> Iterator[Callable[[], list[Trace]]]:
        asked.append(list(ranks))
        yield lambda: [Trace(rank, (), Usage(rank + 1, "", "", {})) for rank in ranks]

    monkeypatch.setattr(module, "tracing_ranks", ranks)
    setup = setup_of(
        "model=llama3_405b", "parallel=fsdp1024_cp2_tp8", "train.seq_len=8192", "train.batch_size=1024"
    )
    model = setup.build_model()
    program = setup.compile(model)
    found = trace_classes(program, model, setup.recipe())
    assert asked.pop() == [0]  # two short models
    assert [c.peak for c in found.classes] == [1, *[None] * (len(found.classes) - 1)]
    shown = trace_classes(program, model, setup.recipe(), 16_383)
    assert asked.pop() == [16_383, 0]  # the rank that was asked for stands for its class
    assert shown.rank == 16_383 and shown.classes[-1].peak == 16_384
    trace_classes(program, model, setup.recipe(), fold=False)
    assert len(asked.pop()) == 3


def test_the_worst_class_is_the_one_with_the_highest_peak() -> None:
    one = Trace(0, (), Usage(5, "", "", {}))
    assert worst(one) == (5, None)
    classes = tuple(module.RankClass(rank, 1, 0, peak) for rank, peak in ((0, 5), (1, 7), (2, None)))
    assert worst(dataclasses.replace(one, classes=classes)) == (7, classes[1])
