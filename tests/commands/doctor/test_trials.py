"""The trials of `doctor`: what they try works here, and what does not is told with what to do."""

from __future__ import annotations

import shutil
import time

import pytest

from parallelizer.commands.doctor import trials
from parallelizer.commands.doctor.trials import Trial


def test_a_trial_that_fails_or_hangs_is_broken_and_has_its_help() -> None:
    def fails() -> str:
        raise RuntimeError("no\nway")

    found = trials.attempt("x", fails, 20, "mend it", needed=True)
    assert found == Trial("x", "broken", "RuntimeError: no", "mend it", True)
    hung = trials.attempt("x", lambda: time.sleep(30) or "", 0.3, "wait")
    assert (hung.state, hung.text) == ("broken", "not done after 0.3 s")


@pytest.mark.ranks
def test_what_is_needed_works_here() -> None:
    for trial, worker in (
        ("ranks", trials._ranks_add_up),
        ("attention", trials._attends),
        ("plan", trials._reads_a_plan),
    ):
        found = trials.attempt(trial, worker, 60, "")
        assert found.state == "works", found


def test_without_a_compiler_it_says_what_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "attempt", lambda name, *rest, **more: Trial(name, "works", ""))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    [found] = [trial for trial in trials.all_trials() if trial.name == "torch.compile"]
    assert (found.state, found.text) == ("absent", "no C++ compiler")
    assert found.help == "apt install g++; only style compile wants it" and not found.needed


def test_an_old_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(RuntimeError, match=r"older than 2\.11"):
        trials._imports_torch()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert "the newest that was tested" in trials._imports_torch()
