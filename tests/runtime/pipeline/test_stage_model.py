"""A stage runs the code of divided modules as the user's model would."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor

import parallelizer as pz
from tests.parity import token_loss
from tests.ranks import run_ranks
from tests.runtime.pipeline.models import ALONE, PP2, Layout, Staged, own_rows, parallel


class DropsInGlue(Staged):
    """Its own code drops elements, in training alone."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = F.dropout(self.before(input_ids), 0.5, self.training)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.after(self.norm(x) * self.scale)
        return logits


@pytest.mark.ranks
def test_evaluation_reaches_the_code_of_divided_modules() -> None:
    def loss(layout: Layout) -> tuple[float, bool]:
        model = parallel(layout, DropsInGlue)
        return pz.evaluate(model, [own_rows(model, 0)], token_loss).item(), model.training

    wanted, training = loss(ALONE)
    for found, after in run_ranks(lambda: loss(PP2), 2):
        assert abs(found - wanted) < 1e-6 and after is training is True
