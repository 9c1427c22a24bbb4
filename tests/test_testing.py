"""`assert_equivalent`: one line in anybody's test suite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelizer import Entry, Pipeline, Workload
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.testing import assert_equivalent
from tests.parity import VOCAB
from tests.proof.subjects import MLP_PLAN, Mlp, plan, token_batch, token_loss
from tests.runtime.pipeline.models import Staged

PLAN = plan(MLP_PLAN)


def build() -> nn.Module:
    torch.manual_seed(3)
    return Mlp()


@pytest.mark.ranks
def test_a_model_with_values_of_its_own_is_proven() -> None:
    assert assert_equivalent(build, PLAN, {"tp": 2}, loss=token_loss, batch=token_batch(0)).passed


@pytest.mark.ranks
def test_a_batch_may_be_a_function_and_the_model_draw_new_values_every_time() -> None:
    assert_equivalent(
        Mlp,
        plan(MLP_PLAN.rstrip() + '\n  "": fsdp\n'),
        {"dp_shard": 2},
        loss=token_loss,
        batch=token_batch,
        accumulate=2,
    )


@pytest.mark.ranks
def test_a_plan_that_computes_something_else_raises_with_the_report() -> None:
    unpacked = plan(
        "version: 1\nrules:\n  gate_up: colwise\n  down: rowwise\n"
    )  # halves of the fused features
    with pytest.raises(AssertionError, match="NOT proven") as caught:
        assert_equivalent(build, unpacked, {"tp": 2}, loss=token_loss, batch=token_batch(0))
    assert "down" in str(caught.value)


def test_a_refused_plan_raises_its_diagnostics() -> None:
    with pytest.raises(PlanError, match="gate_down"):
        assert_equivalent(
            build,
            plan("version: 1\nrules:\n  gate_down: colwise\n"),
            {"tp": 2},
            loss=token_loss,
            batch=token_batch(0),
        )


def test_rows_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(ValueError, match="4 rows cannot be dealt out"):
        assert_equivalent(build, PLAN, {"dp_shard": 3}, loss=token_loss, batch=token_batch(0))
    with pytest.raises(ValueError, match="needs a batch"):
        assert_equivalent(build, PLAN, {"tp": 2}, loss=token_loss)


@pytest.mark.ranks
def test_a_pipeline_of_one_s_own_settings_is_proven() -> None:
    work = Workload(
        {
            "input_ids": Entry(("batch", "sequence"), "int64", (0, VOCAB)),
            "labels": Entry(("batch", "sequence"), "int64", (0, VOCAB)),
        },
        8,
        6,
    )
    stages = plan("rules: {'layers.*': stage}")
    settings = Pipeline("gpipe", microbatches=2)
    assert assert_equivalent(
        Staged, stages, {"pp": 2}, loss=token_loss, workload=work, pipeline=settings
    ).passed
    with pytest.raises(ValueError, match="there is no balance 'width'"):
        assert_equivalent(
            Staged, stages, {"pp": 2}, loss=token_loss, workload=work, pipeline=Pipeline(balance="width")
        )
