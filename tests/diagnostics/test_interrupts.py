"""Ctrl-C while a command is still importing: no traceback, exit status 130."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEND = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1)"


def run(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*([str(folder)] if folder else []), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("module", ["parallelizer", "recipes.train"])
def test_an_interrupted_import_is_no_traceback(module: str, tmp_path: Path) -> None:
    """A `hydra` of ours stands before the real one, and is interrupted."""
    (tmp_path / "hydra").mkdir()
    (tmp_path / "hydra" / "__init__.py").write_text(SEND)
    done = run("-m", module, *(["validate"] if module == "parallelizer" else []), folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_afterwards_it_is_an_exception_again() -> None:
    code = f"from parallelizer.diagnostics import interrupts as i; i.end_at_once(); i.raise_again()\ntry: {SEND}\nexcept KeyboardInterrupt: print('caught')"  # noqa: E501
    assert run("-c", code).stdout == "caught\n"


def test_a_handler_of_somebody_elses_stays() -> None:
    code = f"import signal; signal.signal(2, signal.SIG_IGN)\nfrom parallelizer.diagnostics import interrupts as i; i.end_at_once(); {SEND}; print('on')"  # noqa: E501
    assert run("-c", code).stdout == "on\n"
