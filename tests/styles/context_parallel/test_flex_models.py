"""Models that call `flex_attention`, proven from tokens to gradients on real ranks."""

from __future__ import annotations

import pytest
import torch

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.proof.proof import Proof
from parallelizer.styles.context_parallel import flex
from parallelizer.testing import assert_equivalent
from tests.proof import subjects
from tests.styles.context_parallel.flexible import PLAN, TOKENS, Attend, Flexible

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


def prove(mesh: dict[str, int], attend: Attend | None = None, biased: bool = False) -> Proof:
    torch.manual_seed(0)
    return assert_equivalent(
        lambda: Flexible(attend, biased),
        subjects.plan(PLAN.replace("METHOD", "auto")),
        mesh,
        loss=subjects.token_loss,
        batch=lambda seed: subjects.token_batch(seed, tokens=TOKENS),
    )


def test_a_window_and_a_learned_bias_are_proven() -> None:
    assert prove({"cp": 2}, biased=True).passed


def test_a_window_beside_tensor_parallelism_is_proven() -> None:
    assert prove({"cp": 2, "tp": 2}).passed


def test_a_mask_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_mask_mod", lambda mask: None)
    with pytest.raises(AssertionError, match="NOT proven"):
        prove({"cp": 2})


def test_a_mask_of_the_local_length_fails_by_name() -> None:
    with pytest.raises(
        PlanError, match=r"attend: block_mask was made for 4 rows and 4 keys, those of one rank"
    ):
        prove({"cp": 2}, Attend(length=None))
