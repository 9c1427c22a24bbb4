"""Messages of real ranks: orders in which sends that waited for each other would not end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Workload
from parallelizer.runtime.pipeline import execute
from tests.parity import EXACT, token_loss
from tests.ranks import run_ranks
from tests.runtime.pipeline.models import PLAN, PP2, TOKENS, WORKLOAD, Block, Staged, adamw, parallel, train

ROWS = 16


def twelve() -> nn.Module:
    """A model of twelve blocks, in float64, on meta."""
    with torch.device("meta"):
        model = Staged()
        model.layers = nn.ModuleList(Block(0.0) for _ in range(12))
    return model.double()


def batch() -> dict[str, torch.Tensor]:
    made = WORKLOAD.example(ROWS, TOKENS, "cpu", 3)
    made["labels"][1, 2:] = -100
    return made


def stepped(model: nn.Module) -> list[float]:
    """Losses of an evaluation and of two steps, whose gradients move the weights as they are."""
    before = pz.evaluate(model, [batch()], token_loss).item()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return [
        before,
        *(pz.train_step(model, batch(), token_loss, optimizer, 1.0).loss.item() for _ in range(2)),
    ]


@pytest.mark.ranks
def test_three_stages_on_each_of_four_ranks_end_and_have_the_gradients_of_one_process() -> None:
    """A step and an evaluation: in both, activations for a rank's later stage are sent while it is busy with its earlier one."""
    alone = pz.materialize(twelve(), device="cpu", seed=0)
    losses = stepped(alone)
    pipeline = Pipeline("interleaved-zero-bubble", ROWS, 3)

    def worker() -> list[str]:
        model = twelve()
        sizes = Mesh({"pp": 4})
        workload = Workload(WORKLOAD.entries, ROWS, TOKENS)
        program = pz.compile(PLAN, model, sizes, workload=workload, pipeline=pipeline)
        pz.apply(program, model, pz.build_mesh(sizes, "cpu"))
        pz.materialize(model, device="cpu", seed=0)
        wrong = [
            f"the loss of step {step} is {found}"
            for step, (found, wanted) in enumerate(zip(stepped(model), losses, strict=True))
            if abs(found - wanted) > EXACT
        ]
        weights = pz.whole_state_dict(model)
        return wrong + [
            n for n, t in alone.state_dict().items() if not torch.allclose(weights[n], t, 0, EXACT)
        ]

    assert run_ranks(worker, 4, timeout=30) == [[]] * 4


@pytest.mark.ranks
def test_a_stage_tells_the_next_one_shapes_once_for_each_shape_of_batches() -> None:
    """In a kilobyte, from CPU to CPU: at the first step, and at the first evaluation."""

    def worker() -> list[int]:
        told: list[Any] = []
        send = execute.send_object

        def noted(*given: Any) -> Any:
            sent = send(*given)
            told.extend(tensor for _, tensor in sent if tensor.dtype == torch.uint8)
            return sent

        execute.send_object = noted
        model = parallel(PP2)
        optimizer = adamw(model)
        counts = []
        for act in (train, train, evaluated, evaluated):
            act(model, optimizer, [1])
            counts.append(len(told))
        assert all(tensor.device.type == "cpu" and tensor.numel() < 1024 for tensor in told)
        return counts

    assert run_ranks(worker, 2, timeout=30) == [[1, 1, 2, 2], [0, 0, 0, 0]]


def evaluated(model: nn.Module, *_: Any) -> None:
    pz.evaluate(model, [batch()], token_loss)
