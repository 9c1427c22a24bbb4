"""docs/in_ci.md is followed as it is written: its files in an empty repository, its commands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chosen import a_fifth
from tests.docs.figures import without_figures
from tests.recipes.runs import ROOT, Ended, command, typed

TEXT = (ROOT / "docs/in_ci.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", TEXT, re.S))
CONSOLE = "".join(re.findall(r"```console\n(.*?)```", TEXT, re.S))
SHOWN = dict(re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", CONSOLE, re.M))
HOOKS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
WORKFLOW = ".github/workflows/plans.yaml"
PLAN, LOCK = "conf/plans/mine.yaml", "conf/mine.lock"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run(line: str, here: Path) -> Ended:
    first, *words = shlex.split(line)
    if first == "python":
        return command(*words, cwd=here, timeout=200)
    assert first == "parallelizer"
    return typed(*words, cwd=here, module="parallelizer", timeout=300)


def words_of(line: str) -> list[str]:
    return [word for word in shlex.split(line) if not word.startswith("-")]


def test_the_page_has_all_of_it() -> None:
    assert set(FILES) == {PLAN, "conf/model/mine.yaml", ".pre-commit-config.yaml", WORKFLOW, "test_mine.py"}
    commands = [words_of(line)[1] for line in SHOWN]
    assert commands == ["validate", "validate", "plan", "plan", "pytest", "verify"] or commands == [
        "validate", "validate", "plan", "plan", "test_mine.py", "verify",
    ]  # fmt: skip
    for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.ranks
def test_the_checks_of_every_push_say_what_is_shown(here: Path) -> None:
    """In the order of the page: what is written is what is compared, and a change that nobody meant is told."""
    for line in SHOWN:
        if line.startswith("parallelizer ") and "verify" not in line:
            done = run(line, here)
            said = without_figures(done.err + done.out)
            assert (done.status, said) == (0, without_figures(SHOWN[line])), line
    (compare,) = [line for line in SHOWN if "--locked" in line]
    (here / PLAN).write_text("version: 1\nextends: llama\n")
    changed = run(compare, here)
    assert changed.status == 1 and "activations" in changed.out
    (here / PLAN).write_text("version: 1\nextends: llama\nrules: {layers.*: chekpoint}\n")
    wrong = run(next(iter(SHOWN)), here)
    assert wrong.status == 1 and "no style 'chekpoint'" in wrong.err


@pytest.mark.ranks
@pytest.mark.parametrize("line", a_fifth(line for line in SHOWN if "pytest" in line or "verify" in line))
def test_the_longer_proofs_hold(line: str, here: Path) -> None:
    done = run(line, here)
    assert done.status == 0, done.out + done.err
    assert "proven: " in done.out or re.search(r"\b3 passed", done.out)


def test_the_workflow_runs_what_the_page_shows() -> None:
    jobs = yaml.safe_load(FILES[WORKFLOW])["jobs"]
    steps = [step["run"] for step in jobs["check"]["steps"] if "run" in step]
    assert steps.pop(0).startswith("pip install ./parallelizer ")
    assert steps == [line for line in SHOWN if "--lock " not in line]


def test_the_hooks_are_the_command_of_the_page(here: Path) -> None:
    said = yaml.safe_load(FILES[".pre-commit-config.yaml"])["repos"][0]["hooks"]
    ids = [hook["id"] for hook in HOOKS]
    assert ids == ["parallelizer-validate", "parallelizer-validate-here"] and said[0]["id"] in ids
    project = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert project is not None and f"rev: v{project[1]}\n" in FILES[".pre-commit-config.yaml"]
    for hook in HOOKS:
        assert f"{hook['entry']} {PLAN}" in SHOWN
        chosen = [name for name in (*FILES, "configs/plans/llama.yml") if re.search(hook["files"], name)]
        assert chosen == [PLAN, "configs/plans/llama.yml"]
        # As pre-commit calls it: the entry, and behind it the files.
        every = [str(path) for path in sorted((ROOT / "configs/plans").glob("*.yaml"))]
        done = run(f"{hook['entry']} {shlex.join(every)}", here)
        assert done.status == 0, done.err


@pytest.mark.slow
def test_pre_commit_itself_runs_the_hook(here: Path) -> None:
    """Where `pre-commit` is installed: on a clone of this repository, on a plan that is right and on one that is not."""
    pre_commit = pytest.importorskip("pre_commit")
    assert pre_commit
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=here, check=True)
    subprocess.run([*git, "add", "-A"], cwd=here, check=True)
    trying = [
        sys.executable,
        "-m",
        "pre_commit",
        "try-repo",
        str(ROOT),
        "parallelizer-validate-here",
        "--all-files",
    ]
    right = subprocess.run(trying, cwd=here, capture_output=True, text=True)
    assert right.returncode == 0 and "Passed" in right.stdout, right.stdout + right.stderr
    (here / PLAN).write_text("version: 1\nrules: {layers.*: chekpoint}\n")
    wrong = subprocess.run(trying, cwd=here, capture_output=True, text=True)
    assert wrong.returncode == 1 and "no style 'chekpoint'" in wrong.stdout
