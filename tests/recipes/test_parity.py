"""Every preset and both plans give the losses of one rank on the same global batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer import launch
from parallelizer.compose import compose_config
from parallelizer.config import config_folder, from_config
from recipes.data import Data, build_data
from recipes.train import Job, Result, train

STEPS = 10
SMALL = (
    "model.n_layers=2",
    "model.dim=64",
    "model.hidden_dim=128",
    "model.max_seq_len=128",
    "train.seq_len=64",
    "train.batch_size=8",
    f"train.steps={STEPS}",
    "train.eval_batches=1",
    "train.log_every=0",
    "device=cpu",
)
PRESETS = sorted(p.stem for p in (config_folder() / "parallel").glob("*.yaml") if p.stem != "base")
PLANS = ("llama", "llama_tp")


def world_size(preset: str) -> int:
    config, origins = compose_config(
        [f"parallel={preset}", *SMALL, "train.batch_size=4096", "train.seq_len=128"]
    )
    return from_config(config, origins).mesh.world_size


@pytest.fixture(scope="module")
def data() -> Data:
    config, _ = compose_config(SMALL)
    return build_data(config.data)


def run(data: Data, preset: str, plan: str, *more: str) -> Result:
    config, origins = compose_config([f"parallel={preset}", f"plan={plan}", *SMALL, *more])
    setup = from_config(config, origins)
    program = setup.compile(setup.build_model())
    job = Job(setup, program, data, dict(config.train), dict(config.optim), None)
    return launch.start(train, (job,), ranks=setup.mesh.world_size, device="cpu")[0]


@pytest.fixture(scope="module")
def single(data: Data) -> Result:
    return run(data, "single", "llama")


def assert_same(result: Result, reference: Result) -> None:
    assert len(result.losses) == STEPS
    for mine, theirs in zip(result.losses, reference.losses, strict=True):
        assert abs(mine - theirs) <= 1e-5 * theirs
    assert abs(result.validation_loss - reference.validation_loss) <= 1e-5 * reference.validation_loss


@pytest.mark.ranks
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("preset", [p for p in PRESETS if world_size(p) <= 8])
def test_losses_equal_those_of_one_rank(data: Data, single: Result, preset: str, plan: str) -> None:
    assert_same(run(data, preset, plan), single)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("preset", [p for p in PRESETS if world_size(p) == 16])
def test_losses_of_16_ranks_equal_those_of_one(data: Data, single: Result, preset: str, plan: str) -> None:
    assert_same(run(data, preset, plan, "model.n_heads=16", "model.n_kv_heads=8"), single)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "more",
    [
        ("train.accumulate=2",),
        ("++parallel.styles.fsdp.shard_dim=largest", "++parallel.styles.fsdp.min_size=100"),
        ('rules=["layers.*: checkpoint"]',),
    ],
)
def test_options_change_no_loss(data: Data, single: Result, more: tuple[str, ...]) -> None:
    assert_same(run(data, "fsdp2_tp2", "llama", *more), single)


@pytest.mark.ranks
def test_a_broken_plan_changes_losses(data: Data, single: Result, tmp_path: Path) -> None:
    """The comparison can fail: attention that sees its own rank's tokens only."""
    with pytest.raises(AssertionError):
        assert_same(run(data, "cp2", "llama", 'rules=["layers.0.attention.inner: none"]'), single)
