"""A `rowwise` embedding looks up the rows of its rank: outputs and gradients are those of the whole embedding, and no rank
allocates as much as the gradient of the whole.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from parallelizer.styles.own_rows import RowwiseEmbedding
from parallelizer.torch_private import allocations
from tests.parity import VOCAB, Case, assert_exact, compare, plan
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

WORDS, SIZE, RANKS = 8, 6, 2


class ScaledEmbedding(nn.Embedding):
    """As those of transformers: the table begins with rows that are no word's, and the result is scaled."""

    def forward(self, ids: Tensor, offset: int = 0) -> Tensor:
        return super().forward(ids + offset) * self.embedding_dim**0.5


def sharded(whole: nn.Embedding, ranks: int, output: Any = None) -> nn.Embedding:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    style = RowwiseEmbedding(input_layouts=Replicate(), output_layouts=output or Replicate())
    made = parallelize_module(copy.deepcopy(whole), mesh, style)
    assert isinstance(made, nn.Embedding)
    return made


def same(whole: nn.Embedding, ids: Tensor, ranks: int = RANKS, **arguments: Any) -> None:
    """The output and the gradient of the sharded embedding are those of the whole one, where rank by rank has the same."""
    parts = sharded(whole, ranks)
    ours, reference = parts(ids, **arguments), whole(ids, **arguments)
    torch.testing.assert_close(ours, reference)
    seed = torch.rand(reference.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (ours * seed).sum().backward()
    (reference * seed).sum().backward()
    gradient = parts.weight.grad
    assert isinstance(gradient, DTensor)
    assert gradient.placements == (Shard(0),) or whole.scale_grad_by_freq  # torch's gradient, which is whole
    torch.testing.assert_close(gradient.full_tensor(), whole.weight.grad)


def embedding(words: int = WORDS, kind: type[nn.Embedding] = nn.Embedding, **options: Any) -> nn.Embedding:
    torch.manual_seed(0)
    return kind(words, SIZE, dtype=torch.float64, **options)


CASES: dict[str, tuple[dict[str, Any], Tensor]] = {
    "tokens": ({}, torch.arange(16).reshape(2, 8) % WORDS),
    "words that repeat": ({}, torch.tensor([[3, 3, 3], [5, 3, 0]])),
    "padding on the first rank": ({"padding_idx": 1}, torch.tensor([[1, 1, 2], [5, 1, 4]])),
    "padding on the last rank": ({"padding_idx": -1}, torch.tensor([[7, 7, 2], [4, 7, 3]])),
    # Row 4 is row 0 of rank 1: a rank takes its row 0 for words that it does not hold.
    "padding that is the first row of a rank": ({"padding_idx": 4}, torch.tensor([4, 0, 4, 5, 1])),
    "one word": ({}, torch.tensor(6)),
    "no words": ({}, torch.empty(2, 0, dtype=torch.int64)),
    "three dimensions": ({}, torch.arange(8).reshape(2, 2, 2)),
    "int32": ({}, torch.arange(8, dtype=torch.int32)),
    "an uneven vocabulary": ({"words": 7}, torch.arange(7)),
    "a frozen row and an uneven vocabulary": ({"words": 7, "padding_idx": 5}, torch.arange(7)),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_whole_embedding(name: str) -> None:
    options, ids = CASES[name]
    run_ranks(lambda: same(embedding(**options), ids), RANKS)


@pytest.mark.parametrize("wrong", [WORDS, -1])
def test_an_id_that_no_rank_has_a_row_for_is_an_error_as_in_the_whole_embedding(wrong: int) -> None:
    def worker() -> None:
        ids = torch.tensor([[0, 5], [3, wrong]])
        with pytest.raises(IndexError):
            embedding()(ids)
        with pytest.raises(IndexError):
            sharded(embedding(), RANKS)(ids)

    run_ranks(worker, RANKS)


def test_ranks_that_hold_no_row_add_zero() -> None:
    run_ranks(lambda: same(embedding(words=3), torch.tensor([[2, 0], [1, 1]]), 4), 4)


def test_a_forward_of_a_subclass_runs_around_the_lookup() -> None:
    def worker() -> None:
        same(embedding(kind=ScaledEmbedding), torch.tensor([[0, 5], [3, 1]]), offset=2)

    run_ranks(worker, RANKS)


def test_no_rank_allocates_as_much_as_the_whole_vocabulary() -> None:
    words = 4096

    def worker() -> list[int]:
        found = []
        for output in (Replicate(), Shard(1)):
            parts, ids = sharded(embedding(words), 4, output), torch.arange(16).reshape(2, 8)
            found.append(max(allocations(lambda: parts(ids).sum().backward())))  # noqa: B023
        return found

    row = SIZE * torch.float64.itemsize
    # The gradient of the rank's rows is the largest tensor of all.
    assert run_ranks(worker, 4) == [[words // 4 * row] * 2] * 4


def test_a_head_that_shares_the_weight_adds_its_gradient() -> None:
    def worker() -> None:
        whole, ids = embedding(), torch.tensor([[0, 5], [3, 1]])
        parts = sharded(whole, RANKS)
        weight = parts.weight
        assert isinstance(weight, DTensor)
        logits = F.linear(DTensor.from_local(parts(ids), weight.device_mesh, [Replicate()]), weight)
        logits.full_tensor().square().sum().backward()
        F.linear(whole(ids), whole.weight).square().sum().backward()
        gradient = weight.grad
        assert isinstance(gradient, DTensor) and gradient.placements == (Shard(0),)
        torch.testing.assert_close(gradient.full_tensor(), whole.weight.grad)

    run_ranks(worker, RANKS)


def test_the_lookup_compiles_as_one_graph() -> None:
    def worker() -> None:
        parts, ids = sharded(embedding(), RANKS), torch.tensor([[0, 5], [3, 1]])
        compiled = torch.compile(parts, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids), parts(ids))

    run_ranks(worker, RANKS)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}])
def test_options_that_dtensor_refuses_are_refused(option: dict[str, Any]) -> None:
    def worker() -> None:
        with pytest.raises(NotImplementedError, match="sharding strategy"):
            sharded(embedding(**option), RANKS)(torch.tensor([0, 5])).sum().backward()

    run_ranks(worker, RANKS)


def test_frequencies_are_counted_over_all_ids() -> None:
    run_ranks(lambda: same(embedding(scale_grad_by_freq=True), torch.tensor([0, 5, 5, 7, 0, 1])), RANKS)


class NormedEmbedding(nn.Embedding):
    """As Inkling's."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(super().forward(ids))
        return made


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = NormedEmbedding(), nn.Linear(8, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.words(input_ids))
        return logits


NORMED = """
rules:
  words: {style: rowwise, input: replicate, output: %s}
  words.norm: {style: replicate, grad: replicate}
  head: {style: prepare-input, input: {input: %s -> replicate}, local: true}
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_a_norm_inside_of_an_embedding_gets_the_whole_sum() -> None:
    cases = [
        Case(output, plan(NORMED % (output, output)), {"tp": 2}, Words)
        for output in ("replicate", "shard(1)")
    ]
    for found in compare(cases).values():
        assert_exact(found)
