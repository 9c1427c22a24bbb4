"""The recipe's command line is Hydra's: groups, sweeps, printed configuration, completion, output folders."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.recipes.runs import ROOT, SMALL, entries, metrics, typed

pytestmark = pytest.mark.ranks

RUN = (*SMALL, "train.steps=2")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path


def only(pattern: str, below: Path) -> Path:
    [found] = below.glob(pattern)
    return found


# Output folders


def test_one_folder_written_once_by_the_parent(here: Path) -> None:
    ended = typed(*RUN, "parallel=fsdp2", cwd=here)
    assert ended.status == 0, ended.err
    folder = only("outputs/*/*", here)
    assert entries(folder) == [
        ".hydra", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "metrics.jsonl",
    ]  # fmt: skip
    assert len(metrics(folder)) == 2
    config = OmegaConf.load(folder / ".hydra" / "config.yaml")
    assert config.parallel.mesh.tp == 1 and config.parallel.mesh.dp_shard == 2
    assert config.train.steps == 2
    assert entries(here) == sorted(
        [
            "outputs", f"outputs/{folder.parent.name}", str(folder.relative_to(here)),
            *(str((folder / e).relative_to(here)) for e in entries(folder)),
        ]
    )  # fmt: skip
    assert f"outputs in {folder.relative_to(here)}" in ended.out


def test_paths_are_relative_to_where_the_command_runs(here: Path) -> None:
    (here / "text.txt").write_text((ROOT / "LICENSE").read_text())
    (here / "mine.yaml").write_text((ROOT / "configs" / "plans" / "llama.yaml").read_text())
    ended = typed(
        *RUN, "data=text", "data.path=text.txt", "plan=./mine.yaml", "hydra.run.dir=my/run", cwd=here
    )
    assert ended.status == 0, ended.err
    assert (here / "my" / "run" / "metrics.jsonl").is_file()
    assert not (here / "outputs").exists()


def test_a_dry_run_prints_and_leaves_nothing(here: Path) -> None:
    ended = typed(*RUN, "parallel=tp8_cp2", "model.n_layers=1", "dry_run=true", cwd=here)
    assert ended.status == 0, ended.err
    for part in ("mesh  16 ranks: cp=2 x tp=8", "parameters", "modules", "buffers", "collectives", "memory"):
        assert part in ended.out
    assert entries(here) == []


# Sweeps


def test_a_sweep_over_presets(here: Path) -> None:
    ended = typed("-m", *RUN, "parallel=single,fsdp2", cwd=here)
    assert ended.status == 0, ended.err
    folder = only("multirun/*/*", here)
    assert sorted(p.name for p in folder.iterdir()) == ["0", "1", "multirun.yaml"]
    single, fsdp2 = (metrics(folder / job) for job in ("0", "1"))
    assert [m["loss"] for m in fsdp2] == pytest.approx([m["loss"] for m in single], rel=1e-5)
    assert OmegaConf.load(folder / "1" / ".hydra" / "config.yaml").parallel.mesh.dp_shard == 2


@pytest.mark.slow
def test_a_sweep_over_plans(here: Path) -> None:
    ended = typed("-m", *RUN, "parallel=tp2", "plan=llama,llama_tp", cwd=here)
    assert ended.status == 0, ended.err
    folder = only("multirun/*/*", here)
    runs = [metrics(folder / job) for job in ("0", "1")]
    assert [m["loss"] for m in runs[0]] == pytest.approx([m["loss"] for m in runs[1]], rel=1e-5)
    first, second = ended.out.split("parallel=tp2 plan=llama_tp")
    assert "shard(1) -> replicate" in first and "shard(1) -> replicate" not in second


def test_a_job_that_fails_does_not_stop_a_sweep_and_is_not_forgotten(here: Path) -> None:
    ended = typed("-m", *SMALL, "train.steps=0,1", cwd=here)
    assert ended.status == 1
    assert "train.steps is 0" in ended.err and "Traceback" not in ended.err
    folder = only("multirun/*/*", here)
    assert sorted(p.name for p in folder.iterdir()) == ["1", "multirun.yaml"]
    assert len(metrics(folder / "1")) == 1


def test_a_sweep_in_which_every_job_fails_leaves_nothing(here: Path) -> None:
    ended = typed("-m", *SMALL, "train.steps=0,-1", cwd=here)
    assert ended.status == 1
    assert entries(here) == []


# What is printed


def test_cfg_prints_the_configuration_of_the_job(here: Path) -> None:
    ended = typed("--cfg", "job", "parallel=fsdp2_tp2", "train.steps=7", cwd=here)
    assert ended.status == 0
    config = OmegaConf.create(ended.out)
    assert config.parallel.mesh == {
        "pp": 1,
        "dp_replicate": 1,
        "dp_shard": 2,
        "cp": 1,
        "ep": 1,
        "tp_outer": 1,
        "tp": 2,
    }
    assert config.train.steps == 7 and "hydra" not in config
    assert entries(here) == []


def test_info_prints_the_defaults_list(here: Path) -> None:
    ended = typed("--info", "defaults", "parallel=tp8_cp2", cwd=here)
    assert ended.status == 0
    for config in ("model/llama_debug", "parallel/base", "parallel/tp8_cp2", "data/stdlib", "optim/adamw"):
        assert f"| {config} " in ended.out
    assert entries(here) == []


@pytest.mark.slow
def test_the_shell_completes() -> None:
    """As Hydra's users set it up, with the bash function that the recipe prints."""
    line = "python recipes/train.py parallel=fsdp2"
    script = f"""
        eval "$(python recipes/train.py --shell-completion install=bash)"
        COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)} COMP_CWORD=2
        hydra_bash_completion
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    ran = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env={"PATH": path}, capture_output=True, text=True, timeout=60
    )
    presets = sorted(f"parallel={path.stem}" for path in (ROOT / "configs" / "parallel").glob("fsdp2*.yaml"))
    assert len(presets) > 3 and ran.stdout.split() == presets, ran.stderr


# Rules, layouts, styles and plans from the command line


def test_rules_come_behind_the_plan_s_own(here: Path) -> None:
    ended = typed(
        *RUN,
        "parallel=fsdp2",
        "dry_run=true",
        'parallel.rules=["layers.0: checkpoint"]',
        'rules=["layers.1: {style: checkpoint, mode: selective}"]',
        cwd=here,
    )
    assert ended.status == 0, ended.err
    rows = [line.split() for line in ended.out.splitlines() if "checkpoint" in line]
    assert rows == [["layers.{0,1}", "checkpoint", "command", "line"]]


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("++parallel.layouts.stream=replicate", "input x: replicate -> replicate"),
        ("++parallel.layouts.stream='shard(1)'", "input x: shard(1) -> replicate"),
    ],
)
def test_a_layout_is_switched_everywhere(override: str, shown: str, here: Path) -> None:
    ended = typed(*RUN, "parallel=tp2", "dry_run=true", override, cwd=here)
    assert ended.status == 0, ended.err
    assert ended.out.count(shown) == 2


def test_a_style_s_options_have_defaults_and_a_style_is_switched_off(here: Path) -> None:
    checkpoint = 'rules=["layers.*: checkpoint"]'
    ended = typed(
        *RUN, "parallel=fsdp2", "dry_run=true", checkpoint, "++parallel.styles.fsdp.min_size=100", cwd=here
    )
    assert ended.status == 0, ended.err
    assert "checkpoint" in ended.out and "(too small)" in ended.out
    ended = typed(
        *RUN, "parallel=fsdp2", "dry_run=true", checkpoint, "++parallel.styles.checkpoint=null", cwd=here
    )
    assert ended.status == 0, ended.err
    assert "checkpoint" not in ended.out and "(too small)" not in ended.out


def test_a_plan_by_name_by_path_and_from_a_folder_of_one_s_own(here: Path) -> None:
    (here / "conf" / "plans").mkdir(parents=True)
    text = "version: 1\nextends: llama\nlayouts: {stream: replicate}\n"
    (here / "conf" / "plans" / "whole.yaml").write_text(text)
    (here / "mine.yaml").write_text(text)
    for arguments in (
        ["plan=llama_tp", "dry_run=true"],
        ["plan=./mine.yaml", "dry_run=true"],
        [f"plan={here / 'mine.yaml'}", "dry_run=true"],
        ["--config-dir=conf", "plan=whole", "dry_run=true"],
    ):
        ended = typed(*arguments, *RUN, "parallel=tp2", "model.n_layers=1", cwd=here)
        assert ended.status == 0, (arguments, ended.err)
        assert "input x: replicate -> replicate" in ended.out
