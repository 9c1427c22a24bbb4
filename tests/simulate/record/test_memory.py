"""The predicted memory is the CPU allocator's, to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.memory_truth import Case, cases, compare
from parallelizer.child.children import in_children
from parallelizer.compiler.observe.running_module import Running
from parallelizer.simulate.record.memory import CATEGORIES, MemoryTracker, settled, usage
from tests.chosen import chosen
from tests.simulate.allocator import differences
from tests.simulate.setups import CHECKPOINT, llama, traced

SHOWN = (
    "single bf16",
    "fsdp3 checkpoint",
    "hsdp2x2_tp2",
    "fsdp2_tp2 llama_tp bf16 checkpoint",
    "cp2_tp2 bf16 selective",
    "fsdp2_tp2 min_size",
    "fsdp2 cpu_offload",
    "fsdp2_tp2 tied",
    "fsdp2 bf16 accumulate 2 checkpoint",
    "fsdp3 rank 2",
    "tp8_cp2 bf16 checkpoint rank 15",
    "fsdp2_tp2 gpt bf16",
    "single 10 layers folded checkpoint",
    "fsdp2_tp2 float8 tensorwise bf16",
    "tp2 float8 rowwise bf16",
    "fsdp3 float8 gathered bf16",
)
BY_NAME = {case.name: case for case in cases()}


DEFAULT = ("fsdp2_tp2 llama_tp bf16 checkpoint", "cp2_tp2 bf16 selective")


@pytest.mark.parametrize("name", chosen(SHOWN, DEFAULT))
def test_every_phase_peaks_where_the_allocator_does(name: str) -> None:
    predicted, measured = compare(BY_NAME[name])
    assert differences(predicted, measured) == {}


STAGES = [
    name
    for name in BY_NAME
    if name.startswith(("pp2_cp2", "pp2_fsdp2", "2 stages")) and name.endswith("last rank")
]


@pytest.mark.parametrize("name", chosen(STAGES, ("pp2_cp2 interleaved-1f1b last rank",)))
def test_a_stage_peaks_where_the_allocator_does(name: str) -> None:
    predicted, measured = compare(BY_NAME[name])
    assert predicted["peak"] == measured["peak"]


def test_the_benchmark_has_a_hundred_cases_under_names_of_their_own() -> None:
    every: list[Case] = list(cases())
    assert len(every) == len(BY_NAME) >= 100


def test_what_lives_at_the_peak_adds_up_to_it() -> None:
    memory = traced(llama("parallel=fsdp2_tp2", CHECKPOINT.format("layers"))).memory
    assert sum(memory.at_peak.values()) == memory.peak == max(p.total for p in memory.course)
    assert set(memory.at_peak) == set(CATEGORIES)
    assert all(sum(p.by_category.values()) == p.total for p in memory.course)


def test_parameters_gradients_and_optimizer_states_are_those_of_the_shards() -> None:
    memory = traced(llama("parallel=fsdp4")).memory
    before = memory.course[0].by_category
    shards = before["parameters"]
    tensors = 21  # of two layers, the embeddings, the last norm and the output
    assert before["gradients"] == shards  # float32 both
    assert before["optimizer"] == 2 * shards + 4 * tensors  # two moments, and a step count each


def test_a_rank_with_a_smaller_shard_needs_less() -> None:
    setup = llama("parallel.mesh.dp_shard=3", "train.batch_size=6")
    first, last = (traced(setup, rank).memory for rank in (0, 2))
    assert last.course[0].by_category["parameters"] < first.course[0].by_category["parameters"]
    assert last.peak < first.peak


def fake_changes(run: object) -> list[tuple[int, str]]:
    """Deltas and categories of what `run` allocates on fake tensors, in a child."""

    def child() -> list[tuple[int, str]]:
        from torch._subclasses.fake_tensor import FakeTensorMode

        memory = MemoryTracker(Running(nn.Identity()))
        with FakeTensorMode(), memory:
            run()  # type: ignore[operator]
        return [(c.delta, c.category) for c in settled(memory.events, 0)[1]]

    (changes,) = in_children([(child,)])
    return changes


def test_a_view_is_not_an_allocation() -> None:
    def run() -> None:
        x = torch.zeros(8, 4)
        y = x.t()[1:]
        del x
        assert y.shape == (3, 8)

    assert fake_changes(run) == [(128, "temporaries"), (-128, "temporaries")]


def test_a_gradient_that_autograd_alone_holds_is_added_to_in_place() -> None:
    def run() -> None:
        x = torch.zeros(256, requires_grad=True)
        y = x.sin()
        (y.cos() + y.exp()).sum().backward()

    def real() -> list[int]:
        from parallelizer import torch_private

        return torch_private.allocations(run)

    (measured,) = in_children([(real,)])
    tops = [max_of(changes) for changes in ([d for d, _ in fake_changes(run)], measured)]
    assert tops[0] == tops[1]


def test_one_that_somebody_holds_is_not() -> None:
    held: list[torch.Tensor] = []

    def run() -> None:
        x = torch.zeros(256, requires_grad=True)
        y = x.sin()
        z = y.exp()
        z.register_hook(lambda g: None)
        y.register_hook(held.append)
        a = y.cos()
        a.register_hook(held.append)
        (a + z).sum().backward()
        held.clear()

    def real() -> list[int]:
        from parallelizer import torch_private

        return torch_private.allocations(run)

    (measured,) = in_children([(real,)])
    assert max_of([d for d, _ in fake_changes(run)]) == max_of(measured)


def max_of(changes: list[int]) -> int:
    total, top = 0, 0
    for change in changes:
        total += change
        top = max(top, total)
    return top


def test_the_peak_is_the_first_of_the_highest_points() -> None:
    from parallelizer.simulate.record.memory import MemoryChange

    changes = [
        MemoryChange(5, "activations", "forward", "a"),
        MemoryChange(-5, "activations", "forward", "b"),
        MemoryChange(5, "gradients", "backward", "c"),
    ]
    found = usage(dict.fromkeys(CATEGORIES, 0), changes)
    assert (found.peak, found.phase, found.module) == (5, "forward", "a")
    assert found.at_peak["activations"] == 5 and found.at_peak["gradients"] == 0


def test_a_rowwise_embedding_makes_no_gradient_of_the_whole_vocabulary() -> None:
    memory = traced(llama("parallel=tp4", "model.vocab_size=16384", "train.batch_size=2")).memory
    rows = 16384 // 4 * 64 * 4  # of one rank, in float32
    backward = [p for p in memory.course if p.module == "tok_embeddings" and p.phase == "backward"]
    assert backward and max(p.by_category["temporaries"] for p in backward) < rows
