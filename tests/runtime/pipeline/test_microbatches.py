"""The rows of a batch as microbatches."""

from __future__ import annotations

import pytest
import torch

from parallelizer.language.plan import Plan
from parallelizer.runtime.pipeline.microbatches import microbatches, rows_of
from tests.parity import plan

NO_SEQUENCE = Plan("plan", "plan.yaml")


def test_the_rows_come_back_in_order_and_are_views() -> None:
    batch = {"a": torch.arange(24).view(6, 4), "b": torch.arange(6)}
    cut = microbatches(batch, NO_SEQUENCE, 3)
    for name, whole in batch.items():
        assert torch.equal(torch.cat([part[name] for part in cut]), whole)
        assert all(
            part[name].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in cut
        )


def test_what_all_rows_share_goes_to_every_microbatch() -> None:
    declared = plan('rules: {"": fsdp}\nbuffers: {batch: {positions: 0}}')
    batch = {
        "a": torch.zeros(4, 8),
        "one": torch.zeros(1, 8),
        "number": torch.zeros(()),
        "positions": torch.arange(8),
    }
    for part in microbatches(batch, declared, 2):
        assert {n: tuple(t.shape) for n, t in part.items()} == {
            "a": (2, 8), "one": (1, 8), "number": (), "positions": (8,),
        }  # fmt: skip


def test_one_row_is_a_batch_too() -> None:
    assert rows_of({"a": torch.zeros(1, 8)}, NO_SEQUENCE) == 1


def test_entries_with_different_numbers_of_rows_are_refused_by_name() -> None:
    batch = {"a": torch.zeros(4, 8), "positions": torch.arange(8)}
    with pytest.raises(ValueError, match=r"different numbers of rows .*: a has 4, positions has 8"):
        microbatches(batch, NO_SEQUENCE, 2)


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 rows of a data rank cannot be cut into 3 microbatches"):
        microbatches({"a": torch.zeros(4, 8)}, NO_SEQUENCE, 3)
