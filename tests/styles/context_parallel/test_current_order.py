"""Two batches in flight, dealt out in different orders: a checkpoint's recomputation is made in the order of its own forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.language.plan import Mesh
from tests.parity import plan
from tests.proof.test_documents import Packed
from tests.ranks import run_ranks
from tests.styles.context_parallel.reference import relative_error

WRITTEN = """
version: 1
rules:
  attend: [context-parallel, checkpoint]
  "": fsdp
buffers:
  batch:
    input_ids: 1
    weights: 1
    document_ids: {dim: 1, documents: true}
    positions: positions
    mask: document-mask
"""


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ends = ([[3, 9], [5, 6]], [[8, 10], [1, 2]])
    return [
        {
            "input_ids": torch.randint(256, (2, 12), generator=generator),
            "weights": torch.randn(2, 12, 1, dtype=torch.float64, generator=generator),
            "document_ids": torch.stack(
                [sum((torch.arange(12) >= e).long() for e in row) for row in of_batch]
            ),
        }
        for of_batch in ends
    ]


def loss_of(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out: Tensor = model(batch["input_ids"], batch["positions"], batch["mask"])
    return (out.square() * batch["weights"]).sum()


@pytest.mark.ranks
def test_two_forwards_before_two_backwards_have_the_gradients_of_one_rank() -> None:
    rules = plan(WRITTEN)

    def worker() -> float:
        mesh = pz.build_mesh(Mesh({"cp": 2}), "cpu")
        torch.manual_seed(0)
        alone, model = Packed().double(), Packed().double()
        model.load_state_dict(alone.state_dict())
        sum(loss_of(alone, pz.shard_batch(batch, rules, None)) for batch in batches()).backward()  # type: ignore[union-attr]
        pz.parallelize(model, rules, mesh)
        local = [pz.shard_batch(batch, rules, mesh) for batch in batches()]
        losses = [loss_of(model, batch) for batch in local]
        for loss in losses:  # the first one's forward is recomputed after the second one's
            loss.backward()
        errors = []
        for (name, param), right in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert param.grad is not None and right.grad is not None
            whole = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            if name != "k.bias":  # softmax has no gradient for it
                errors.append(relative_error(whole, right.grad))
        return max(errors)

    assert max(run_ranks(worker, 2)) < 1e-12
