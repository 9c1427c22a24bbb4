"""Every preset and both plans train as one rank does: the same losses on the same batches, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from benchmarks.proofs.matrix import meshes
from parallelizer.compiler import all_checks as checks
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.runtime import step
from tests.recipes.runs import metrics, run_here

STEPS = 10
TOLERANCE = 1e-5
"""Of each step's loss, relative to the loss of one rank."""

PLANS = ("llama", "llama_tp")
"""They differ in the layout of activations over tp alone, so the second one runs on presets with tp."""
PRESETS = {
    "fsdp2": 2, "tp2": 2, "cp2": 2, "fsdp4": 4, "hsdp2x2": 4, "tp4": 4, "cp4": 4,
    "fsdp2_tp2": 4, "cp2_tp2": 4, "fsdp2_cp2_tp2": 8, "tp8_cp2": 16,
    "pp2": 2, "pp2_tp2": 4, "pp2_fsdp2": 4, "pp2_cp2": 4, "pp2_fsdp2_tp2": 8,
}  # fmt: skip
"""The presets that one machine can run, by their number of ranks."""

DEFAULT = {
    ("fsdp2", "llama"),
    ("tp2", "llama"),
    ("tp2", "llama_tp"),
    ("cp2", "llama"),
    ("hsdp2x2", "llama"),
    ("fsdp2_cp2_tp2", "llama"),
}
"""Every axis alone, and all of them together; the others are for the whole run."""


def marks(preset: str, plan: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if (preset, plan) in DEFAULT else (pytest.mark.slow,)


CASES = [
    pytest.param(preset, plan, id=f"{preset}-{plan}", marks=marks(preset, plan))
    for preset in PRESETS
    for plan in (PLANS if "tp" in preset else PLANS[:1])
]

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank."""
    return losses(tmp_path_factory.mktemp("single"), "parallel=single")


def losses(folder: Path, *overrides: str) -> list[float]:
    """The loss of every step, then the validation loss."""
    run_here(folder, f"train.steps={STEPS}", "train.log_every=0", "optim.warmup=2", *overrides)
    measured = metrics(folder)
    return [m["loss"] for m in measured] + [measured[-1]["validation_loss"]]


def worst(got: list[float], expected: list[float]) -> float:
    """The largest relative difference of any step."""
    return max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("train.accumulate=2",),
        ("++parallel.styles.fsdp.shard_dim=largest", "++parallel.styles.fsdp.min_size=100"),
        ('rules=["layers.*: checkpoint"]',),
    ],
)
def test_options_change_no_loss(more: tuple[str, ...], one_rank: list[float], tmp_path: Path) -> None:
    assert worst(losses(tmp_path, "parallel=fsdp2_tp2", *more), one_rank) <= TOLERANCE


@pytest.mark.parametrize(("preset", "plan"), CASES)
def test_losses_are_those_of_one_rank(preset: str, plan: str, one_rank: list[float], tmp_path: Path) -> None:
    assert len(one_rank) == STEPS + 1
    assert (
        one_rank[STEPS - 1] < one_rank[0] - 0.5
    )  # it learns: equal losses of a model that stands still prove little
    got = losses(tmp_path, f"parallel={preset}", f"plan={plan}")
    assert worst(got, one_rank) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("style", ["compile", "checkpoint"])
def test_a_backward_that_can_run_once_only_is_not_split(style: str, tmp_path: Path) -> None:
    """Under a schedule that splits backwards, of four stages."""
    four = (
        "model.n_layers=4",
        "model.dim=256",
        "model.hidden_dim=704",
        "train.seq_len=32",
        f'rules=["layers.*: {style}"]',
    )
    folders = [tmp_path / "alone", tmp_path / "split"]
    for folder in folders:
        folder.mkdir()
    alone = losses(folders[0], *four, "parallel=single")
    split = losses(folders[1], *four, "parallel=pp2", "parallel.pipeline.schedule=zbv")
    assert worst(split, alone) <= TOLERANCE


def test_every_preset_that_fits_is_here() -> None:
    # The model has two layers, too few for four stages, and no experts.
    sizes = {
        name: mesh.world_size
        for name, mesh in meshes().items()
        if name not in ("single", "pp4") and mesh.ep == 1
    }
    assert {name: ranks for name, ranks in sizes.items() if ranks <= 16} == PRESETS
    plans = {file.stem for file in (config_folder() / "plans").glob("llama*.yaml")}
    assert {*PLANS} == plans - {
        "llama_packed"
    }  # which takes batches of another kind: tests/training/data/test_documents.py


def test_a_wrong_norm_is_noticed(
    one_rank: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail: gradients clipped by what a rank sees alone."""

    def of_the_local_shards(parameters: Sequence[torch.Tensor], _: object = None) -> torch.Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        return torch.stack([part.square().sum() for part in parts]).sum().sqrt()

    monkeypatch.setattr(step, "grad_norm", of_the_local_shards)
    assert worst(losses(tmp_path, "parallel=fsdp2"), one_rank) > 10 * TOLERANCE


def test_attention_to_a_rank_s_own_tokens_is_noticed(
    one_rank: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which `validate` refuses."""
    monkeypatch.setattr(checks, "CHECKS", ())
    broken = 'rules=["layers.0.attention.inner: none"]'
    assert worst(losses(tmp_path, "parallel=cp2", broken), one_rank) > 10 * TOLERANCE
