"""A label that is no class is reported with the entry that has it, by every cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.losses import cross_entropy
from parallelizer.runtime.loss_sums import loss_sums
from tests.ranks import run_ranks

LOGITS = torch.zeros(1, 4, 16)
BATCH = {"input_ids": torch.tensor([[99, 1, 2, 3]]), "labels": torch.tensor([[1, 99, -100, 3]])}


def torchs(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """A loss of the user's own."""
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), 3


@pytest.mark.parametrize("loss", [cross_entropy, torchs])
def test_it_is_named_with_its_entry_and_the_number_of_classes(loss: Callable[..., Any]) -> None:
    with pytest.raises(PlanError) as caught:
        loss_sums(loss, LOGITS, BATCH)
    [found] = caught.value.diagnostics
    assert found.code == "data-mismatch"
    assert found.message == "the batch's 'labels' has the label 99, and the model's output has 16 classes"
    assert found.help is not None and found.help.startswith("labels are numbers from 0 to 15, or -100")


@pytest.mark.ranks
def test_it_is_named_where_logits_are_sharded() -> None:
    def worker() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(PlanError, match="'labels' has the label 99"):
            loss_sums(cross_entropy, distribute_tensor(LOGITS, mesh, [Shard(-1)]), BATCH)

    run_ranks(worker, 2)


def test_another_error_of_a_loss_stays_as_it_is() -> None:
    def failing(output: Tensor, batch: Any) -> Any:
        raise IndexError("list index out of range")

    with pytest.raises(IndexError, match="list index"):
        loss_sums(failing, LOGITS, BATCH)
