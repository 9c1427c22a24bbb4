"""What a checkpoint says of its run becomes configuration that a command can change."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.training.keep.checkpoints import record_of
from parallelizer.training.keep.recorded import overrides_for

PLAN = "version: 1\nextends: llama\nlayouts: {stream: replicate}\n"


def record(folder: Path, *overrides: str) -> dict[str, object]:
    """Of a run with a plan of its own, which is gone later."""
    folder.mkdir()
    plan = folder / "mine.yaml"
    plan.write_text(PLAN)
    config, origins = compose_config([*overrides, f"plan={plan}"])
    made = record_of(config, from_config(config, origins))
    plan.unlink()
    return made


def composed(folder: Path, made: dict[str, object], *given: str) -> tuple[object, ...]:
    folder.mkdir()
    config, origins = compose_config([*overrides_for(made, folder, given), *given], config_name="generate")
    setup = from_config(config, origins)
    layouts = {name: str(layout) for name, layout in setup.plan.layouts.items()}
    return (
        OmegaConf.to_container(config.model, resolve=True),
        config.data.heldout,
        layouts,
        setup.mesh.world_size,
    )


def test_model_data_and_a_plan_that_is_gone_come_back(tmp_path: Path) -> None:
    made = record(tmp_path / "plans", "model.dim=64", "data.heldout=0.5", "parallel=cp2")
    model, heldout, layouts, world = composed(tmp_path / "a", made, "parallel=tp2")
    assert isinstance(model, dict) and model["dim"] == 64 and model["n_layers"] == 2
    assert (heldout, layouts, world) == (0.5, {"stream": "replicate"}, 2)


def test_a_command_changes_what_is_recorded(tmp_path: Path) -> None:
    made = record(tmp_path / "plans", "model.dim=64", "data.heldout=0.5")
    model, heldout, layouts, _ = composed(
        tmp_path / "a", made, "model.n_layers=3", "data=stdlib", "plan=llama"
    )
    assert isinstance(model, dict) and (model["dim"], model["n_layers"]) == (64, 3)
    assert (heldout, layouts) == (0.05, {"stream": "shard(1)"})
    other, *_ = composed(tmp_path / "b", made, "model=hf_llama")
    assert isinstance(other, dict) and other["config"]["model_type"] == "llama"
