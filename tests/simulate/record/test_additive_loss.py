"""A loss whose numbers do not add up over the parts of a batch is refused at its line; one that does is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry, Workload
from parallelizer.losses import classification, cross_entropy
from parallelizer.simulate.record.additive_loss import TriedLoss, refuse_other_than_sums

TOKENS = Workload(
    {
        "input_ids": Entry(("batch", "sequence"), range=(0, 11)),
        "labels": Entry(("batch", "sequence"), range=(0, 11), ignore=-100),
    },
    batch_size=8,
    seq_len=64,
)
IMAGES = Workload(
    {
        "images": Entry(("batch", 3, 8, 8), "float32"),
        "labels": Entry(("batch",), range=(0, 11)),
    },
    batch_size=8,
    seq_len=64,
)


def mean_of_means(output: torch.Tensor, batch: Any) -> Any:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten()), torch.tensor(1)


def mean_and_count(output: torch.Tensor, batch: Any) -> Any:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten()), batch["labels"].numel()


def shifting(output: torch.Tensor, batch: Any) -> Any:
    labels = batch["labels"][:, 1:]
    losses = F.cross_entropy(output[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
    return losses, (labels != -100).sum()


def drawing(output: torch.Tensor, batch: Any) -> Any:
    total, weight = cross_entropy(output, batch)
    return total * torch.rand(()), weight


def refused(loss: Any, mesh: dict[str, int], workload: Workload = TOKENS, output: Any = (2, 32, 11)) -> str:
    """What is said of the loss, after a step of 2 rows of 32 tokens on each rank; nothing if it may stay."""
    seen = TriedLoss(loss)
    batch = workload.example(2, 32)
    seen.watched()(torch.randn(output), batch)
    try:
        refuse_other_than_sums(seen, workload, Mesh(mesh))
    except PlanError as error:
        [found] = error.diagnostics
        assert found.code == "wrong-loss" and found.span and found.span.file.endswith("test_additive_loss.py")
        return f"{found.message}; {found.help}"
    return ""


@pytest.mark.parametrize("loss", [mean_of_means, mean_and_count])
def test_a_mean_is_refused_where_ranks_hold_different_rows_or_tokens(loss: Any) -> None:
    assert "for the two rows, which add up to" in refused(loss, {"dp_shard": 2})
    assert "for the two halves of its sequence" in refused(loss, {"cp": 2})
    assert not refused(loss, {"tp": 2}), "one part of the batch: its mean is the mean"


def test_a_mean_is_right_where_no_label_is_left_out() -> None:
    entries = {name: dataclasses.replace(entry, ignore=None) for name, entry in TOKENS.entries.items()}
    whole = dataclasses.replace(TOKENS, entries=entries)
    assert not refused(mean_of_means, {"dp_shard": 2}, whole) and not refused(mean_of_means, {"cp": 2}, whole)


def test_labels_that_the_loss_shifts_are_refused_where_the_sequence_is_split() -> None:
    assert not refused(shifting, {"dp_shard": 2})
    assert "labels are shifted in the data" in refused(shifting, {"cp": 2})


def test_sums_and_what_cannot_be_tried_are_not_refused() -> None:
    assert not refused(cross_entropy, {"dp_shard": 2, "cp": 2})
    assert not refused(classification, {"dp_shard": 2}, IMAGES, (2, 11))
    assert not refused(drawing, {"dp_shard": 2})

    def of_one_size(output: torch.Tensor, batch: Any) -> Any:
        return output.reshape(2, 32, 11).sum(), 1

    assert not refused(of_one_size, {"dp_shard": 2}), "it does not run on the small batch"


def test_the_numbers_are_those_of_the_loss() -> None:
    def one(output: torch.Tensor, batch: Any) -> Any:
        return torch.tensor(3.0), len(output)

    assert (
        "returns (3, 2) for a batch, but (3, 1) and (3, 1) for the two rows, which add up to (6, 2)"
        in refused(one, {"dp_replicate": 2})
    )
