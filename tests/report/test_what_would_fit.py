"""What a step that does not fit would need with other settings."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from parallelizer.report.capacity import Capacity
from parallelizer.report.text.dry_run import _would_fit
from parallelizer.report.what_would_fit import Alternative, what_would_fit
from parallelizer.simulate.record.memory import Usage
from parallelizer.simulate.record.trace import Trace
from parallelizer.styles.application import Program
from tests.simulate.setups import llama


def _traced(program: Program, model: Any, recipe: Any, rank: int) -> Any:
    """A trace that has 2 bytes for each row of a rank, half with checkpointing, and 8 more over the shards."""
    rows = recipe.workload.batch_size // recipe.workload.accumulate // program.mesh.size("dp_shard")
    each = 1 if program.of_slot("checkpoint") else 2
    return SimpleNamespace(memory=SimpleNamespace(peak=rows * each + 8 // program.mesh.size("dp_shard")))


def test_checkpointing_offload_a_smaller_batch_and_more_shards_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("parallelizer.report.what_would_fit.trace", _traced)
    setup = llama("parallel=fsdp2", "train.batch_size=16")
    model = setup.build_model()
    program = setup.compile(model)
    step = Trace(0, (), Usage(20, "forward", "", {"parameters": 3, "optimizer": 2, "activations": 15}))
    found = what_would_fit(setup, program, model, step, 13)
    assert [(one.change, one.peak) for one in found] == [
        ("the rule `layers.*: checkpoint`", 12),
        ("++parallel.styles.fsdp.cpu_offload=true", 15),
        ("train.accumulate=2", 12),
        ("parallel.mesh.dp_shard=4, on 4 ranks", 10),
    ]
    tight = what_would_fit(setup, program, model, step, 5)
    assert (tight[-1].change, tight[-1].peak) == (
        "the rule `layers.*: checkpoint` and train.accumulate=8", 5
    )  # fmt: skip


def _traced_stages(program: Program, model: Any, recipe: Any, rank: int) -> Any:
    """A trace that has 2 bytes for each row of a microbatch, half with checkpointing."""
    microbatches = program.require_stages().pipeline.microbatches or 1
    each = 1 if program.of_slot("checkpoint") else 2
    return SimpleNamespace(memory=SimpleNamespace(peak=each * recipe.workload.batch_size // microbatches))


def test_a_pipeline_takes_more_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallelizer.report.what_would_fit.trace", _traced_stages)
    setup = llama("parallel=pp2", "train.batch_size=64", "parallel.pipeline.microbatches=2")
    model = setup.build_model()
    program = setup.compile(model)
    step = Trace(0, (), Usage(64, "forward", "", {"activations": 64}))

    def found(total: int) -> list[tuple[str, int]]:
        every = what_would_fit(setup, program, model, step, total)
        return [(one.change, one.peak) for one in every if "offload" not in one.change]

    checkpointed = ("the rule `layers.*: checkpoint`", 32)
    assert found(16)[:2] == [checkpointed, ("parallel.pipeline.microbatches=8", 16)]
    assert found(17)[:2] == [checkpointed, ("parallel.pipeline.microbatches=8", 16)]
    assert found(2)[:2] == [checkpointed, ("parallel.pipeline.microbatches=64", 2)]
    assert found(1)[-1] == ("the rule `layers.*: checkpoint` and parallel.pipeline.microbatches=64", 1)


def test_those_that_fit_come_first() -> None:
    stream = io.StringIO()
    found = [
        Alternative("train.accumulate=2", 3 << 30),
        Alternative("the rule `layers.*: checkpoint`", 1 << 30),
    ]
    _would_fit(found, Capacity("H100", 2 << 30, -(1 << 30), ""), stream)
    assert stream.getvalue().splitlines() == [
        "what would fit 2.0 GiB: the peak with",
        "  the rule `layers.*: checkpoint`     1.0 GiB  fits",
        "  train.accumulate=2                  3.0 GiB  does not fit",
        "",
    ]
