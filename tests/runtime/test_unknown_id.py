"""An id without a row in an embedding is reported with the embedding and the batch entry, also where the rows are split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.step import outcome_for_loss
from parallelizer.styles.own_rows import RowwiseEmbedding
from tests.ranks import run_ranks

ROWS, LENGTH = 16, 4


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(ROWS, 8), nn.Embedding(LENGTH, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        made: Tensor = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        return made


def told(ids: list[int], model: nn.Module | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        outcome_for_loss(model or Words(), {"input_ids": torch.tensor([ids])})
    [found] = caught.value.diagnostics
    assert found.code == "data-mismatch" and found.help is not None
    return f"{found.message}; {found.help}"


def test_it_is_named_with_its_entry_and_the_embedding() -> None:
    text = told([1, 99, 2, 3])
    assert "the batch's 'input_ids' has the id 99, and the embedding words has 16 rows" in text
    assert "ids are numbers from 0 to 15" in text
    assert "the id -1" in told([1, -1, 2, 3])


def test_a_position_that_the_table_lacks_is_named_without_an_entry() -> None:
    assert "the embedding places has 4 rows, and is given the id 4" in told([8, 9, 10, 11, 12])


@pytest.mark.ranks
def test_it_is_named_by_every_rank_that_holds_a_part_of_the_rows() -> None:
    def worker() -> None:
        model, mesh = Words(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        style = RowwiseEmbedding(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(model.words, mesh, style)
        assert "has the id 99, and the embedding words has 16 rows" in told([1, 99, 2, 3], model)

    run_ranks(worker, 2)


def test_another_index_error_stays_as_it_is() -> None:
    class Failing(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            none: list[Tensor] = []
            return none[0]

    with pytest.raises(IndexError, match="list index"):
        outcome_for_loss(Failing(), {"input_ids": torch.zeros(1, 1, dtype=torch.int64)})
