"""The facts of `doctor`: what is missing is told with its pip line, and nothing private is told."""

from __future__ import annotations

import getpass
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallelizer.commands.doctor import facts
from tests.recipes.runs import ROOT


def test_extras_are_those_of_the_project() -> None:
    asked = facts.packages_by_extra()
    written = (ROOT / "pyproject.toml").read_text()
    assert "hf" in asked and "transformers" in asked["hf"] and not {"dev", "docs"} & set(asked)
    assert all(re.search(rf"^{extra} = \[", written, re.M) for extra in asked)


def test_a_missing_extra_is_told_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "packages_by_extra", lambda: {"hf": ["torch", "no-such-package"]})
    [(name, told)] = facts.extras()
    assert name == "hf" and re.fullmatch(
        r"torch \S+; without no-such-package: pip install no-such-package", told
    )


def test_one_s_own_configuration_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "plans").mkdir(parents=True)
    (tmp_path / "mine" / "plans" / "a.yaml").write_text("")
    (tmp_path / "other" / "plans").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = dict(facts.configuration())
    assert found["--config-dir mine"] == "~/mine: 1 plans, 0 presets, 0 models" and len(found) == 2


def test_nothing_private_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(ROOT.parent))
    monkeypatch.setenv("NCCL_SECRET", "hunter2")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "host[1-2]")
    monkeypatch.setenv("SLURM_NTASKS", "8")

    def groups() -> Iterator[tuple[str, str]]:
        for group in (facts.versions, facts.machine, facts.configuration, facts.launchers):
            yield from group()

    told = "\n".join(f"{name}  {value}" for name, value in groups())
    assert "NCCL_SECRET" in told and "inside a job of 8 tasks" in told
    for private in ("hunter2", "host[", str(ROOT.parent), platform.node(), "4711"):
        assert private not in told
    assert getpass.getuser() == "root" or getpass.getuser() not in told
