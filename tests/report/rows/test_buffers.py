"""The rows of buffers are the plan's, where the sequence is split at all."""

from __future__ import annotations

import pytest
import torch

from parallelizer.report.rows.buffers import buffer_rows, dealt_out, imbalance
from parallelizer.styles.context_parallel.dealing import by_cost
from parallelizer.styles.context_parallel.order import Contiguous, Order
from tests.report.rows.plans import compiled


def test_the_batch_comes_before_the_model() -> None:
    program, _ = compiled("parallel=cp2")
    assert [(row.name, row.owner, row.split) for row in buffer_rows(program)] == [
        ("input_ids", "batch", "dimension 1"),
        ("labels", "batch", "dimension 1"),
        ("rope.*", "model", "dimension 0"),
    ]
    assert dealt_out(program).startswith("head and tail chunks paired: ")


def test_without_cp_nothing_is_split() -> None:
    assert buffer_rows(compiled("parallel=tp2")[0]) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_head_and_tail_are_even_and_neighbours_are_not(ranks: int) -> None:
    rows = 2 * ranks * 100
    assert imbalance(Order(ranks), rows) == 1
    shares = [int((torch.arange(r * 200, r * 200 + 200) + 1).sum()) for r in range(ranks)]
    assert imbalance(Contiguous(ranks), rows) == pytest.approx(max(shares) * ranks / sum(shares))
    if ranks > 1:
        with pytest.raises(ValueError, match="known of a batch only"):
            imbalance(by_cost(torch.rand(rows), ranks), rows)
