"""The time line of a step: what is computed, with sizes and bytes, and where the computation waits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parallelizer.simulate.record.flops import step_flops
from parallelizer.simulate.record.operator_sizes import gemm_sizes, way_of
from parallelizer.simulate.record.operators import ATTENTION, GEMM, MEMORY, Issued, Moment, Operator, Wait
from parallelizer.torch_private import TorchDispatchMode
from tests.chosen import chosen
from tests.simulate.setups import CHECKPOINT, in_float8, llama, stack, traced, traced_llama

LONG = ("model.n_layers=9",)  # enough equal layers to be folded


def operators(line: Sequence[Moment], kind: str = "") -> list[Operator]:
    return [m for m in line if isinstance(m, Operator) and kind in ("", m.kind)]


def total(line: Sequence[Moment]) -> int:
    return sum(o.flops for o in operators(line))


def test_products_and_attention_have_their_sizes() -> None:
    """Batch 8, 32 tokens, 64 wide with 16 heads of 4, of which keys have 8; 128 in the feed-forward network; 256 words."""
    line = traced_llama().line
    forward = [
        o.sizes for o in operators(line, GEMM) if o.phase == "forward" and o.module.startswith("layers.0.")
    ]
    rows = 8 * 32
    assert forward == [
        (1, rows, 64, 64), (1, rows, 32, 64), (1, rows, 32, 64), (1, rows, 64, 64),
        (1, rows, 128, 64), (1, rows, 128, 64), (1, rows, 64, 128),
    ]  # fmt: skip
    seen = operators(line, ATTENTION)
    assert {(o.sizes, o.causal) for o in seen} == {((8, 16, 8, 32, 32, 4), True)}
    assert [o.backward for o in seen] == [False, False, True, True]


def test_products_of_groups_count_all_their_rows() -> None:
    """Of [S, K] times [G, K, N], and of the gradients of both: 2 S K N each."""
    rows, weights = torch.zeros(12, 8, requires_grad=True), torch.zeros(3, 8, 16, requires_grad=True)
    seen: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if way_of(func) == GEMM and (read := gemm_sizes(func, args, result)):
                seen.append(read[0])
            return result

    with Watch():
        result = F.grouped_mm(rows, weights, offs=torch.tensor([5, 5, 12], dtype=torch.int32))
        (result * torch.ones_like(result)).sum().backward()
    assert seen == [(3, 4, 16, 8), (3, 8, 16, 4), (3, 4, 8, 16)]
    assert [math.prod(sizes) for sizes in seen] == [12 * 8 * 16] * 3


def test_the_operations_are_those_that_torch_counts() -> None:
    """Of products of matrices; torch counts all of attention, and its backward by other kernels."""
    setup = llama()
    model = setup.build_model()
    whole = step_flops(setup.compile(model), model, setup.workload, setup.loss())
    assert whole is not None
    products = sum(o.flops for o in operators(traced(setup).line, GEMM))
    # Written out, attention has two products forward and four backward, each 2 b h s^2 d.
    attention = 2 * 6 * (2 * 8 * 16 * 32 * 32 * 4)
    assert products == whole - attention


def test_each_of_two_tensor_ranks_computes_half() -> None:
    assert total(traced_llama("parallel=tp2").line) == total(traced_llama().line) // 2


def test_a_checkpoint_computes_forward_again_and_says_so() -> None:
    plain, again = traced_llama().line, traced_llama(CHECKPOINT.format("layers")).line
    forward = sum(
        o.flops for o in operators(plain) if o.phase == "forward" and o.module.startswith("layers.")
    )
    repeated = [o for o in operators(again) if o.again]
    assert not [o for o in operators(plain) if o.again and o.flops]
    # Torch stops the recomputation when all that backward reads is there: the last product of a layer is left out.
    assert 0.7 * forward < sum(o.flops for o in repeated) <= forward
    assert {o.phase for o in repeated} == {"backward"}


@pytest.mark.parametrize("mode, share", [("selective", 0.0), ("alternate", 0.5)])
def test_checkpoints_that_keep_products_compute_fewer_again(mode: str, share: float) -> None:
    line = traced_llama(f'rules=["layers.*: {{style: checkpoint, mode: {mode}}}"]').line
    products = [o for o in operators(line, GEMM) if o.phase == "forward" and o.module.startswith("layers.")]
    again = [o for o in operators(line, GEMM) if o.again]
    assert len(again) == pytest.approx(share * len(products), abs=2)


def test_a_compiled_chain_moves_what_it_reads_and_leaves_behind() -> None:
    plain, compiled = (traced_llama(*rule).line for rule in ((), ('rules=["layers.*: compile"]',)))

    def moved(line: Sequence[Moment]) -> int:
        return sum(o.moved for o in operators(line, MEMORY) if o.module.startswith("layers."))

    assert total(plain) == total(compiled)
    assert 0.2 * moved(plain) < moved(compiled) < 0.7 * moved(plain)


def test_collectives_stand_in_the_line_in_the_ledger_s_order_and_styles_wait_for_theirs() -> None:
    step = traced_llama("parallel=fsdp2_tp2")
    issued = [m for m in step.line if isinstance(m, Issued)]
    assert tuple(m.entry for m in issued) == step.ledger
    assert {m.entry.axis for m in issued if m.unit} == {"dp_shard"}
    seen, waited = 0, set()
    for moment in step.line:
        if isinstance(moment, Issued):
            seen += 1
        elif isinstance(moment, Wait):
            waited.add(seen - moment.back)
    tensor = {i for i, m in enumerate(issued) if m.entry.axis == "tp" and not m.unit and not m.waits}
    assert tensor == waited


def test_every_gather_of_fsdp_has_the_copy_that_waits_for_it() -> None:
    line = traced_llama("parallel=fsdp4").line
    outs = sum(o.copies == "out" for o in operators(line))
    assert outs == sum(isinstance(m, Issued) and m.unit and m.entry.kind == "all_gather" for m in line) > 0


def test_a_ring_waits_where_it_reads_what_it_received() -> None:
    line = traced(
        llama("parallel=cp2", "++rules=['layers.*.attention.inner: {style: context-parallel, method: ring}']")
    ).line
    received = [m for m in line if isinstance(m, Issued) and m.entry.kind == "recv"]
    waits = [m for m in line if isinstance(m, Wait)]
    assert received and len(waits) >= len(received) // 2


FOLDED = {
    "fsdp tp": ("parallel=fsdp2_tp2",),
    "checkpoint": ("parallel=fsdp2", CHECKPOINT.format("layers")),
    "compile": ("parallel=tp2", 'rules=["layers.*: compile"]'),
    "accumulate": ("parallel=fsdp2", "train.accumulate=2"),
    "cp": ("parallel=cp2",),
}


@pytest.mark.parametrize("kind", chosen(FOLDED, ("fsdp tp",)))
def test_folding_equal_layers_changes_nothing(kind: str) -> None:
    setup = llama(*LONG, *FOLDED[kind])
    whole, folded = (traced(setup, fold=fold).line for fold in (False, True))
    inside = ("forward", "backward")
    assert [m for m in folded if m.phase in inside] == [m for m in whole if m.phase in inside]
    for line in (whole, folded):
        assert sum(o.moved for o in operators(line) if o.phase == "optimizer") == sum(
            o.moved for o in operators(whole) if o.phase == "optimizer"
        )


@pytest.mark.slow
def test_recording_twice_gives_the_same_line() -> None:
    """Storages are told apart by numbers and not by addresses, which come again."""
    lines = [traced(stack("parallel=fsdp2")).line for _ in range(2)]
    assert [dataclasses.replace(m) for m in lines[0]] == list(lines[1])


@pytest.mark.parametrize(
    ("recipe", "by_scale_of_all", "by_scales_of_rows"),
    # Backward scales by rows after a product of kernels for one scale, which are faster.
    [("tensorwise", 3, 0), ("rowwise", 2, 1), ("rowwise-gw-hp", 1, 1)],
)
def test_products_in_float8_are_those_of_kernels_on_cuda_and_emulated_on_a_cpu(
    recipe: str, by_scale_of_all: int, by_scales_of_rows: int
) -> None:
    def kernels(device: str) -> tuple[int, int]:
        line = traced_llama("model.n_layers=1", f"device={device}", in_float8(recipe)).line
        seen = [o.dtype for o in operators(line, GEMM) if o.name == "_scaled_mm"]
        return seen.count("float8"), seen.count("float8_rowwise")

    linears = 7
    assert kernels("cuda") == (by_scale_of_all * linears, by_scales_of_rows * linears)
    assert kernels("cpu") == (0, 0)
