"""docs/stable.md and docs/changelog.md say what is so."""

from __future__ import annotations

import re

import yaml

import parallelizer as pz
from parallelizer.commands.main import COMMANDS
from tests.recipes.runs import ROOT
from tests.test_public_names import BESIDE

STABLE = (ROOT / "docs/stable.md").read_text()
CHANGELOG = (ROOT / "docs/changelog.md").read_text()


def test_every_public_name_and_command_is_in_the_changelog() -> None:
    told = set(re.findall(r"`([\w.-]+)`", CHANGELOG))
    assert {name for name in pz.__all__ if name not in told} == set()
    assert {command.NAME for command in COMMANDS} <= told
    beside = {f"{module}.{name}" for module, names in BESIDE.items() for name in names}
    assert {name for name in beside if name not in told and name.rpartition(".")[0] not in STABLE} == set()
    assert f"## {pz.__version__} " in CHANGELOG


def test_links_and_tests_that_they_name_are_there() -> None:
    for text in (STABLE, CHANGELOG):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert (ROOT / "docs" / target).exists(), target
        for path in re.findall(r"`((?:tests|parallelizer|configs|recipes)/[\w/.]*)`", text):
            assert (ROOT / path).exists(), path


def test_the_configuration_has_the_keys_that_are_stable() -> None:
    root = yaml.safe_load((ROOT / "configs/train.yaml").read_text())
    groups = {next(iter(entry)) for entry in root["defaults"] if isinstance(entry, dict)}
    assert {"model", "parallel", "data", "optim", "hardware"} <= groups
    assert {"plan", "rules", "imports", "device", "dry_run", "train", "launch"} <= set(root)
    train = {"steps", "batch_size", "accumulate", "seq_len", "dtype", "seed", "clip", "eval_every", "eval_batches",
             "log_every", "pretrained", "save", "checkpoint_every", "checkpoint_dir", "keep_last", "keep_every", "resume",
             "check_every", "on_drift", "on_nonfinite"}  # fmt: skip
    launch = {"start_timeout", "collective_timeout", "max_cpu_ranks", "max_restarts", "stuck_after", "stop_grace",
              "requeue_code"}  # fmt: skip
    assert train <= set(root["train"]) and launch <= set(root["launch"])
    preset = yaml.safe_load((ROOT / "configs/parallel/base.yaml").read_text())
    assert {"mesh", "layouts", "rules", "styles"} <= set(preset)


def test_every_shipped_plan_says_its_version() -> None:
    plans = sorted((ROOT / "configs/plans").glob("*.yaml"))
    assert len(plans) > 20
    assert [p.name for p in plans if not re.search(r"^version: 1$", p.read_text(), re.M)] == []


def test_the_oldest_and_newest_versions_are_those_of_the_project() -> None:
    from parallelizer.commands.doctor.trials import OLDEST

    project = (ROOT / "pyproject.toml").read_text()
    oldest = ".".join(map(str, OLDEST))
    assert f'"torch>={oldest}"' in project and f"torch {oldest} and newer" in STABLE
    for minor in (11, 12, 13):
        assert f"3.{minor}" in STABLE and f"Programming Language :: Python :: 3.{minor}" in project
