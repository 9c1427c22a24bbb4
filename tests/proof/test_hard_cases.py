"""Training that is uneven: frozen parameters, shards of unequal size or none, labels that are ignored,
gradients that cancel to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.losses import cross_entropy
from parallelizer.models.llama import Llama
from parallelizer.proof import observe
from parallelizer.proof.proof import Proof
from parallelizer.report.documents import verify_document
from parallelizer.testing import assert_equivalent
from tests.proof import faults, subjects

pytestmark = pytest.mark.ranks

FROZEN = {
    "embeddings": ("tok_embeddings",),
    "norms": ("norm",),
    "a layer": ("layers.0.",),
    "all but the output": ("tok_embeddings", "layers.", "norm"),
}
SMALL = {"vocab_size": 32, "dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 24}
UNEVEN = {**SMALL, "vocab_size": 66, "dim": 20, "n_heads": 2, "hidden_dim": 26}
FEWER_THAN_RANKS = {**SMALL, "vocab_size": 65, "dim": 6, "n_heads": 3, "n_kv_heads": 1, "hidden_dim": 7}
"""Of 6 rows over 4 ranks the last has none."""

Part = Callable[[torch.Tensor], torch.Tensor]
"""A view of some of the labels."""

IGNORED: dict[str, Part] = {
    "half of the rows": lambda labels: labels[4:],
    "all rows but one": lambda labels: labels[1:],
    "half of the sequence": lambda labels: labels[:, :6],
    "all tokens but one": lambda labels: labels.view(-1)[1:],
}

MESHES = (
    {"dp_shard": 4},
    {"dp_replicate": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2},
    {"cp": 2, "tp": 2},
)
slow_meshes = pytest.mark.parametrize("mesh", MESHES, ids=str)


def prove(
    mesh: dict[str, int],
    frozen: tuple[str, ...] = (),
    ignored: Part | None = None,
    sizes: dict[str, int] = SMALL,
) -> Proof:
    def build() -> nn.Module:
        with torch.device("meta"):
            model = Llama(**sizes, max_seq_len=16)
        for name, param in model.named_parameters():
            param.requires_grad_(not any(part in name for part in frozen))
        return model

    def batch(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids, labels = torch.randint(0, sizes["vocab_size"], (2, 8, 12), generator=generator)
        if ignored:
            ignored(labels).fill_(-100)
        return {"input_ids": ids, "labels": labels}

    return assert_equivalent(build, "llama", mesh, loss=cross_entropy, batch=batch)


def test_frozen_parameters_are_proven_and_have_no_gradient() -> None:
    proof = prove({"dp_shard": 2}, FROZEN["a layer"])
    without = {p["name"] for p in verify_document(proof)["parameters"] if p["gradient_error"] is None}
    assert without == proof.frozen and len(without) == 9


def test_shards_of_unequal_size_are_proven() -> None:
    prove({"dp_shard": 2}, sizes={**SMALL, "vocab_size": 33, "hidden_dim": 25})


def test_a_rank_without_a_label_is_proven() -> None:
    prove({"cp": 2}, ignored=IGNORED["all tokens but one"])


def test_no_label_at_all_is_told_and_not_judged() -> None:
    with pytest.raises(PlanError, match="the loss is nan in the unsharded model"):
        prove({"tp": 2}, ignored=lambda labels: labels)


def biased(**options: Any) -> Proof:
    return assert_equivalent(
        lambda: subjects.Attention(**options),
        subjects.plan(subjects.ATTENTION_PLAN),
        {"tp": 2},
        loss=subjects.token_loss,
        batch=subjects.token_batch,
    )


def test_a_gradient_that_cancels_to_rounding_is_proven_and_hides_nothing() -> None:
    proof = biased()
    assert proof.verdict.constant < 1000
    assert max(d.share for d in proof.verdict.of("gradient")) < 0.5
    with pytest.MonkeyPatch.context() as patch:
        faults.on_ranks(patch, observe, "apply", _apply_and_scale_a_gradient)
        with pytest.raises(AssertionError, match=r"k\.weight"):
            biased()


def _apply_and_scale_a_gradient(right: Any, program: Any, model: nn.Module, mesh: Any) -> None:
    right(program, model, mesh)
    model.get_parameter("k.weight").register_hook(lambda gradient: gradient * (1 + 1e-10))


def test_a_model_that_draws_random_numbers_is_told_and_not_judged() -> None:
    with pytest.raises(PlanError, match="the unsharded run does not repeat"):
        biased(dropout=0.5)


@pytest.mark.slow
@slow_meshes
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parameters_are_proven_on_four_ranks(mesh: dict[str, int], frozen: str) -> None:
    prove(mesh, FROZEN[frozen])


@pytest.mark.slow
@slow_meshes
def test_shards_of_unequal_size_are_proven_on_four_ranks(mesh: dict[str, int]) -> None:
    prove(mesh, sizes=UNEVEN)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[:3], ids=str)
def test_ranks_without_rows_of_a_parameter_are_proven(mesh: dict[str, int]) -> None:
    prove(mesh, sizes=FEWER_THAN_RANKS)


@pytest.mark.slow
@slow_meshes
@pytest.mark.parametrize("ignored", IGNORED)
def test_ignored_labels_are_proven_on_four_ranks(mesh: dict[str, int], ignored: str) -> None:
    prove(mesh, ignored=IGNORED[ignored])


class Scalar(nn.Module):
    """Returns its loss. `scale` has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).relu()) * scale).square().sum()


def own(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output, batch["x"].shape[0]


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"scale": torch.rand((), generator=generator), "x": torch.randn(4, 8, generator=generator)}


@pytest.mark.parametrize("mesh", [{"tp": 2}, pytest.param({"dp_replicate": 2}, marks=pytest.mark.slow)])
def test_a_model_that_returns_a_number_and_takes_an_entry_without_rows_is_proven(
    mesh: dict[str, int],
) -> None:
    plan = subjects.plan("version: 1\nrules:\n  up: colwise\n  down: rowwise\n  '': fsdp")
    assert assert_equivalent(Scalar, plan, mesh, loss=own, batch=draw).passed
