"""A stage runs the code of divided modules as the user's model would."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.child.children import in_children
from parallelizer.runtime.state import state_of
from parallelizer.simulate.fake_world import enter_fake_world
from tests.parity import token_loss
from tests.ranks import run_ranks
from tests.runtime.pipeline.models import ALONE, PP2, ZBV, Layout, Staged, own_rows, parallel


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


class Turn(nn.Module):
    """A table by position, which every stage makes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Identity()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.rise(torch.ones_like(input_ids, dtype=torch.float32).cumsum(-1)).unsqueeze(-1)


class Turned(Staged):
    """Every block is given the table."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = Turn()

    def forward(self, input_ids: Tensor) -> Tensor:
        table = self.turn(input_ids)
        x = self.before(input_ids)
        for layer in self.layers:
            x = layer(x * table.cos())
        logits: Tensor = self.after(self.norm(x) * self.scale)
        return logits


def stages_of_a_rank() -> list[tuple[bool, int, int]]:
    """For each module of the table, on the two stages of rank 0: whether it is one object, and the hooks of each."""
    enter_fake_world(2, 0)
    pipeline = state_of(parallel(ZBV, Turned)).pipeline  # type: ignore[union-attr]
    first, last = (pipeline.models[stage] for stage in (0, 3))  # type: ignore[union-attr]
    assert "turn" in first.stage.recomputed & last.stage.recomputed
    found = []
    for path in ("turn", "turn.rise"):
        one, other = first.model.get_submodule(path), last.model.get_submodule(path)
        found.append((one is other, len(one._forward_hooks), len(other._forward_hooks)))
    return found


def test_two_stages_of_a_rank_each_have_a_module_that_both_recompute() -> None:
    """So that each applies its own rules to it, once."""
    [found] = in_children([(stages_of_a_rank,)])
    assert found == [(False, 1, 1), (False, 0, 0)]
