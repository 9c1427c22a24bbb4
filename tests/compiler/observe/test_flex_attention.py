"""A step with `flex_attention` on fake tensors, where FlexAttention itself does not run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.child.children import in_children
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry, Workload
from parallelizer.simulate.follow.flow import FollowedStep, follow
from parallelizer.simulate.record.trace import Recipe, Trace, trace
from tests.findings import compiled, on_meta
from tests.proof import subjects
from tests.styles.context_parallel.flexible import PLAN, TOKENS, Attend, Flexible

IDS = Entry(("batch", "sequence"), range=(0, subjects.VOCAB))
WORKLOAD = Workload({"input_ids": IDS, "labels": IDS}, 2, TOKENS)
TEXT = PLAN.replace("METHOD", "auto")
CHECKPOINTED = TEXT.replace(
    "  attend: {style: context-parallel, method: auto}", "  attend: [context-parallel, checkpoint]"
)


class Both(Flexible):
    """Calls scaled_dot_product_attention too, in a module of its own."""

    def __init__(self) -> None:
        super().__init__(Attend(length=None))  # torch refuses one of another length than its rows
        self.other = Attention()

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) + self.other(self.embed(input_ids))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x).squeeze(1)


def followed(text: str, mesh: dict[str, int], model: Callable[[], nn.Module] = Flexible) -> FollowedStep:
    program = compiled(text, model, Mesh(mesh), workload=WORKLOAD)
    (flow,) = in_children([(follow, program, on_meta(model), WORKLOAD, subjects.token_loss)])
    return flow


def traced(mesh: dict[str, int]) -> Trace:
    program = compiled(CHECKPOINTED, Flexible, Mesh(mesh), workload=WORKLOAD)
    recipe = Recipe(
        WORKLOAD, subjects.token_loss, lambda m: torch.optim.AdamW(m.parameters(), foreach=False), None
    )
    return trace(program, on_meta(Flexible), recipe)


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"tp": 2}], ids=str)
def test_a_step_is_followed_and_dry_run(mesh: dict[str, int]) -> None:
    flow = followed(TEXT, mesh)
    assert flow.failure is None and flow.attentions == [] and flow.positions == []
    # A checkpoint runs it again, in the backward.
    assert any(e.module == "attend" for e in traced(mesh).ledger) == ("cp" in mesh)


def test_a_learned_bias_is_followed() -> None:
    assert followed(TEXT, {"cp": 2}, partial(Flexible, biased=True)).failure is None


def test_flex_attention_that_no_rule_names_is_said_to_see_local_rows() -> None:
    for wrapped, local in (("attend", []), ("other", ["attend"])):
        flow = followed(
            TEXT.replace("attend:", f"{wrapped}:"), {"cp": 2}, Both if wrapped == "other" else Flexible
        )
        assert flow.failure is None and flow.attentions == local
