"""`parallelizer doctor`: what it tries works here, what does not is told with what to do, and nothing private is told."""

from __future__ import annotations

import getpass
import json
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallelizer.commands.doctor import command as doctor
from parallelizer.commands.doctor.command import Report, Trial
from tests.recipes.runs import ROOT, typed

FINE = Trial("a", "works", "well", needed=True)
MISSING = Trial("c", "absent", "no GPU", "use none")
BROKEN = Trial("b", "broken", "it fell", "mend it", needed=True)


def test_only_what_is_needed_makes_it_ill() -> None:
    assert Report({}, (FINE, MISSING)).healthy
    assert Report({}, (Trial("b", "broken", "it fell", "mend it"),)).healthy
    assert not Report({}, (FINE, BROKEN)).healthy


def test_the_report_is_a_line_each_and_says_what_to_do() -> None:
    report = Report({"versions": {"torch": "9.9"}, "machine": {"memory": "1 GiB"}}, (FINE, BROKEN, MISSING))
    assert doctor.text(report).splitlines() == [
        "versions",
        "  torch   9.9",
        "",
        "machine",
        "  memory  1 GiB",
        "",
        "what works here",
        "  a       works: well",
        "  b       broken: it fell",
        "          mend it",
        "  c       absent: no GPU",
        "          use none",
        "",
        "needed and broken: b",
    ]
    assert doctor.document(report) == {
        "healthy": False,
        "versions": {"torch": "9.9"},
        "machine": {"memory": "1 GiB"},
        "trials": [
            {"name": "a", "state": "works", "text": "well", "help": None, "needed": True},
            {"name": "b", "state": "broken", "text": "it fell", "help": "mend it", "needed": True},
            {"name": "c", "state": "absent", "text": "no GPU", "help": "use none", "needed": False},
        ],
    }


def test_a_trial_that_fails_or_hangs_is_broken_and_has_its_help() -> None:
    def fails() -> str:
        raise RuntimeError("no\nway")

    found = doctor.attempt("x", fails, 20, "mend it", needed=True)
    assert found == Trial("x", "broken", "RuntimeError: no", "mend it", True)
    hung = doctor.attempt("x", lambda: time.sleep(30) or "", 0.3, "wait")
    assert (hung.state, hung.text) == ("broken", "not done after 0.3 s")


def test_extras_are_those_of_the_project() -> None:
    asked = doctor.extras()
    written = (ROOT / "pyproject.toml").read_text()
    assert "hf" in asked and "transformers" in asked["hf"] and not {"dev", "docs"} & set(asked)
    assert all(re.search(rf"^{extra} = \[", written, re.M) for extra in asked)


def test_a_missing_extra_is_told_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "extras", lambda: {"hf": ["torch", "no-such-package"]})
    [(name, told)] = doctor._extras()
    assert name == "hf" and re.fullmatch(
        r"torch \S+; without no-such-package: pip install 'parallelizer\[hf\]'", told
    )


def test_one_s_own_configuration_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "plans").mkdir(parents=True)
    (tmp_path / "mine" / "plans" / "a.yaml").write_text("")
    (tmp_path / "other" / "plans").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = dict(doctor._configuration())
    assert found["--config-dir mine"] == "~/mine: 1 plans, 0 presets, 0 models" and len(found) == 2


def test_nothing_private_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(ROOT.parent))
    monkeypatch.setenv("NCCL_SECRET", "hunter2")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "host[1-2]")
    monkeypatch.setenv("SLURM_NTASKS", "8")

    def facts() -> Iterator[tuple[str, str]]:
        for group in (doctor._versions, doctor._machine, doctor._configuration, doctor._launchers):
            yield from group()

    told = "\n".join(f"{name}  {value}" for name, value in facts())
    assert "NCCL_SECRET" in told and "inside a job of 8 tasks" in told
    for private in ("hunter2", "host[", str(ROOT.parent), platform.node(), "4711"):
        assert private not in told
    assert getpass.getuser() == "root" or getpass.getuser() not in told


@pytest.mark.ranks
def test_what_is_needed_works_here() -> None:
    for trial, worker in (
        ("ranks", doctor._ranks_add_up),
        ("attention", doctor._attends),
        ("plan", doctor._reads_a_plan),
    ):
        found = doctor.attempt(trial, worker, 60, "")
        assert found.state == "works", found


@pytest.mark.slow
@pytest.mark.ranks
def test_the_command_runs_whole_and_leaves_nothing(tmp_path: Path) -> None:
    done = typed("doctor", "--json", cwd=tmp_path, module="parallelizer", timeout=200)
    told = json.loads(done.out)
    assert done.status == 0 and told["healthy"] and not done.err
    assert [t["name"] for t in told["trials"] if t["needed"]] == [
        "torch is imported", "a plan is read", "a configuration is composed", "a step is traced on a fake world",
        "two gloo ranks add up",
    ]  # fmt: skip
    assert all(t["help"] for t in told["trials"] if t["state"] != "works")


def test_it_takes_no_overrides(tmp_path: Path) -> None:
    done = typed("doctor", "parallel=tp2", cwd=tmp_path, module="parallelizer")
    assert done.status == 2 and "takes no overrides" in done.err


def test_an_old_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(RuntimeError, match=r"older than 2\.11"):
        doctor._imports_torch()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert "the newest that was tested" in doctor._imports_torch()
