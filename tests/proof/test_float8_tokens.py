"""The groups of tokens that share a scale of float8, as they lie on ranks."""

from __future__ import annotations

import pytest
import torch

from parallelizer.proof.float8_tokens import LowPrecision, token_groups
from parallelizer.styles.context_parallel.dealing import per_document
from parallelizer.styles.context_parallel.order import Contiguous, Order


def precision(data: int = 1, microbatches: int = 1, ranks: int = 1, length: int = 8) -> LowPrecision:
    return LowPrecision({}, data, microbatches, ranks, "auto", length)


def groups(shape: tuple[int, ...], given: LowPrecision, order: Order | None = None) -> list[list[int]]:
    return token_groups(torch.Size(shape), given, order).sort(1).values.tolist()


def test_rows_of_data_ranks_and_microbatches_are_neighbours() -> None:
    assert groups((4, 2), precision(data=2, length=2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups((4, 2), precision(2, 2, length=2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with torch.no_grad():  # an evaluation is not cut
        assert groups((4, 2), precision(2, 2, length=2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("shape", [(2, 8), (16,)])
def test_ranks_of_cp_have_the_ends_and_the_middle_of_each_row(shape: tuple[int, ...]) -> None:
    assert groups(shape, precision(ranks=2)) == [
        [0, 1, 6, 7, 8, 9, 14, 15],
        [2, 3, 4, 5, 10, 11, 12, 13],
    ]


def test_documents_are_dealt_out_row_by_row() -> None:
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0]])
    order = per_document(documents, 2)
    assert groups((2, 8), precision(ranks=2), order) == [
        [0, 3, 4, 7, 8, 9, 14, 15],
        [1, 2, 5, 6, 10, 11, 12, 13],
    ]
    of_microbatches = precision(microbatches=2, ranks=2)
    assert groups((2, 8), of_microbatches, order)[2:] == [[8, 9, 14, 15], [10, 11, 12, 13]]


def test_neighbours_stay_on_a_rank_without_balance() -> None:
    assert groups((1, 8), precision(ranks=2), Contiguous(2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_tokens_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide into 2 blocks"):
        token_groups(torch.Size((3, 1)), precision(data=2))
    with pytest.raises(ValueError, match="no sequences of 8"):
        token_groups(torch.Size((2, 7)), precision(ranks=2))
    with pytest.raises(ValueError, match="no 2 sequences of 4"):
        token_groups(torch.Size((3, 4)), precision(ranks=2, length=4), per_document(torch.zeros(2, 4), 2))
    with pytest.raises(ValueError, match="a sequence of 6 does not divide over 2 ranks"):
        token_groups(torch.Size((1, 6)), precision(ranks=2, length=6), Order(2, length=6))
