"""A rehearsed rank against the dry run and the same rank of a real run: the same collectives, and the same peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.child.children import WorldError
from parallelizer.configuration.setup import Setup
from parallelizer.mesh import build_mesh
from parallelizer.report.rows.rehearsal import Compared
from parallelizer.runtime.initialize import materialize
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.planned import differences, observing, of_the_step, plan_step
from parallelizer.simulate.record.trace import local_parts
from parallelizer.simulate.rehearse import host_reads, kernels
from parallelizer.simulate.rehearse.peaks import peak_of
from parallelizer.simulate.rehearse.rehearse import Rehearsal, rehearse
from parallelizer.styles.application import Program
from tests.ranks import run_ranks
from tests.simulate.record.test_planned import RANDOM_STATE
from tests.simulate.setups import CHECKPOINT, GATHERED, in_float8, llama

RING = 'rules=["layers.*.attention.inner: {style: context-parallel, method: ring}"]'
CASES = {
    "fsdp2_tp2": ("parallel=fsdp2_tp2",),
    "cp2 ring": ("parallel=cp2", RING),
    "cp2_tp2": ("parallel=cp2_tp2",),
    "hsdp2x2 bf16": ("parallel=hsdp2x2", "train.dtype=bfloat16"),
    "fsdp2 float8 gathered": ("parallel=fsdp2", in_float8("tensorwise", GATHERED)),
    "tp4 checkpoint": ("parallel=tp4", CHECKPOINT.format("layers")),
    "pp2": ("parallel=pp2",),
    "pp2_fsdp2_tp2": ("parallel=pp2_fsdp2_tp2",),
}


def rehearsed(setup: Setup, rank: int = 0) -> Rehearsal:
    model = setup.build_model()
    return rehearse(setup.compile(model), model, setup.recipe(), rank=rank, steps=1)


def real(setup: Setup) -> tuple[list[Collective], int]:
    """The collectives of rank 0's first step over gloo, and the peak of its third, which has optimizer states."""
    torch.autograd.set_multithreading_enabled(False)
    model = setup.build_model()
    program, recipe = setup.compile(model), setup.recipe()
    mesh = build_mesh(setup.mesh, "cpu")
    pz.apply(program, model, mesh)
    materialize(model, device="cpu", seed=0)
    optimizer = recipe.optimizer(model)
    parts = local_parts(recipe.workload, program, mesh)

    def step() -> None:
        pz.train_step(model, parts, recipe.loss, optimizer, recipe.clip, skip_nonfinite=True)

    with observing(program, mesh, model) as seen:
        step()
    step()
    return of_the_step(seen.entries), peak_of(step, "cpu", model, optimizer, parts).requested


def stand_ins(program: Program, model: nn.Module, rank: int) -> int:
    """The bytes of a number that a stage keeps between steps for each dtype and shape of parameters of other stages: the dry run
    alone sees them.
    """
    if program.stages is None:
        return 0
    stages, kept = program.stages, 0
    for stage in stages.on_rank(rank):
        others = [p for n, p in model.named_parameters() if stage not in stages.copies(n)]
        kept += sum(dtype.itemsize for dtype, _ in {(p.dtype, p.shape) for p in others})
    return kept


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case", ["cp2 ring", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c != "cp2 ring")]
)
def test_a_rehearsed_rank_sends_and_holds_what_the_real_one_does(case: str) -> None:
    if "float8" in case:
        pytest.importorskip("torchao", reason="float8 needs torchao")
    setup = llama(*CASES[case])
    model = setup.build_model()
    program, recipe = setup.compile(model), setup.recipe()
    planned, found = plan_step(program, model, recipe), rehearse(program, model, recipe, steps=1)
    assert found.ledger and differences(planned.ledger, found.ledger) == []
    # Positions, and the rows of positional buffers at them, stay on the device between steps, where only the dry run sees them.
    row = 8 + sum(buffer[0].nbytes for buffer in model.buffers())
    kept = row * recipe.workload.seq_len // 2 if setup.mesh.sizes["cp"] > 1 else 0
    kept += stand_ins(program, model, 0)
    assert found.peak.requested == planned.peak + RANDOM_STATE - kept
    collectives, peak = run_ranks(real, setup.mesh.world_size, setup)[0]
    assert differences(collectives, found.ledger) == []
    # Gloo copies the input of a reduce-scatter, and its threads hold buffers of messages for a moment longer.
    assert 0 <= peak - found.peak.requested <= max(e.payload_bytes for e in collectives)


def test_the_last_of_many_ranks_has_finite_values_that_are_its_own() -> None:
    setup = llama("parallel=tp8_cp2")
    first, last = rehearsed(setup), rehearsed(setup, 15)
    assert (last.rank, last.ranks) == (15, 16)
    for one in (first, last):
        assert torch.tensor([one.loss, one.grad_norm]).isfinite().all() and one.grad_norm > 0
        assert one.host_reads == {}  # the device decides whether a step is applied
    assert first.loss != last.loss
    assert first.kernels.seconds["matrix products"] > 0


def test_compiled_layers_make_their_graph_in_the_first_step_alone() -> None:
    setup = llama("parallel=fsdp2", 'rules=["layers.*: {style: compile, backend: eager}"]')
    found = rehearsed(setup)
    assert found.graphs == (1, 0)


@pytest.mark.parametrize("preset", ["fsdp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_collectives_of_compiled_layers_are_compared_too(preset: str) -> None:
    setup = llama(f"parallel={preset}", 'rules=["layers.*: {style: compile, backend: eager}"]')
    model = setup.build_model()
    planned = plan_step(setup.compile(model), model, setup.recipe())
    compared = Compared(planned, rehearsed(setup))
    assert compared.rehearsal.ledger and compared.rehearsal.compiled
    assert compared.different == []
    less = replace(compared.rehearsal, ledger=compared.rehearsal.ledger[1:])
    assert len(replace(compared, rehearsal=less).different) == 1


@pytest.mark.parametrize(
    "schedule", ["1f1b", pytest.param("interleaved-zero-bubble", marks=pytest.mark.slow)]
)
def test_every_rank_of_a_pipeline_has_the_memory_and_collectives_that_were_planned(schedule: str) -> None:
    more = () if schedule == "1f1b" else ("parallel.pipeline.stages_per_rank=2",)
    setup = llama("parallel=pp2", "model.n_layers=4", f"parallel.pipeline.schedule={schedule}", *more)
    model = setup.build_model()
    program, recipe = setup.compile(model), setup.recipe()
    for rank in range(2):
        planned = plan_step(program, model, recipe, rank)
        found = rehearse(program, model, recipe, rank=rank, steps=1)
        assert found.ledger and differences(planned.ledger, found.ledger) == []
        assert found.peak.requested == planned.peak + RANDOM_STATE - stand_ins(program, model, rank)
        assert torch.tensor([found.loss, found.grad_norm]).isfinite().all() and found.grad_norm > 0


def test_a_step_without_finite_numbers_is_no_rehearsal() -> None:
    setup = llama("parallel=tp2")
    model = setup.build_model()
    recipe = replace(setup.recipe(), loss=_infinite)
    with pytest.raises(WorldError, match="not finite, and the optimizer did not run"):
        rehearse(setup.compile(model), model, recipe, steps=1)


def _infinite(output: torch.Tensor, batch: pz.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return output.sum() * float("inf"), torch.ones(())


def test_a_host_read_is_told_by_its_line() -> None:
    def step() -> None:
        torch.ones(3).sum().item()
        torch.ones(3).tolist()

    places = host_reads.host_reads(step, "cpu")
    assert sum(places.values()) == 2
    assert all(Path(place.rpartition(":")[0]).name == Path(__file__).name for place in places)


def test_kernels_are_told_apart_by_kind() -> None:
    found = kernels.kernels_of(lambda: torch.ones(64, 64) @ torch.ones(64, 64), "cpu")
    assert set(found.seconds) >= {"matrix products"} and found.count >= 2
