"""What a recording keeps of modules, and in which order."""

from __future__ import annotations

import torch
from torch import nn

from parallelizer.language.pipeline.actions import Action, ActionKind
from parallelizer.proof.recording import Tensors, recording
from parallelizer.runtime.pipeline import progress


class Twice(nn.Module):
    """Calls its first layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(self.first(x)))
        return output


def test_outputs_are_in_the_order_of_forward_and_gradients_in_that_of_backward() -> None:
    model, outputs, gradients = Twice(), list[Tensors](), list[Tensors]()
    x = torch.randn(2, 3)
    with recording(model, outputs, gradients):
        model(x).sum().backward()
    assert [list(one) for one in outputs] == [["first", "last"]]
    assert [list(one) for one in gradients] == [["last", "first"]]
    assert torch.equal(outputs[0]["first"], model.first(x))
    assert torch.equal(gradients[0]["last"], torch.ones(2, 3))


def test_microbatches_are_put_together_by_their_number_each_with_its_first_call() -> None:
    model, outputs, gradients = Twice(), list[Tensors](), list[Tensors]()
    rows = torch.randn(4, 3)
    with recording(model, outputs, gradients):
        for part, microbatch in ((0, 1), (0, 0), (1, 0)):  # of a later part nothing is kept
            progress.tell((part, Action(ActionKind.FORWARD, 0, microbatch)))
            model(rows[2 * microbatch :][:2]).sum().backward()
    torch.testing.assert_close(outputs[0]["first"], model.first(rows))
    assert gradients[0]["last"].shape == (4, 3)
