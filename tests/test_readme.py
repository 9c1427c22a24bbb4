"""Every command that the README shows runs; every file that it links to is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
FAILING = {"atention", "ffn_norm: none"}
"""Commands with one of these words are shown because they fail."""

QUICK = {
    "benchmarks/startup.py": ["--ranks", "2", "--repeats", "1"],
    "benchmarks/step_time.py": ["--blocks", "2", "--steps", "1"],
    "benchmarks.memory_truth": ["--help"],
    "benchmarks.ledger_truth": ["--help"],
    "benchmarks/any_size.py": ["--help"],
    "tests.hostile": ["--help"],
    "tests.fuzz": ["--help"],
    "tests.typos": ["--help"],
}
"""What makes a benchmark short here; the long ones have their arguments read, and tests of their own for what
they measure.
"""


def commands() -> list[str]:
    """The lines with a prompt in `console` blocks, and the commands in tables."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.S):
        found += [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    found += re.findall(r"\| `(python [^`]+)` \|", TEXT)
    return list(dict.fromkeys(found))


@pytest.mark.ranks
@pytest.mark.parametrize("command", commands())
def test_the_command_runs(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    assert words[0] == "python"
    if "recipes.train" in words and not any(w.startswith("train.steps") for w in words):
        words.append("train.steps=1")
    named = words[2] if words[1] == "-m" else words[1]
    words += QUICK.get(named, [])
    if words[1].startswith("benchmarks/"):
        words[1] = str(ROOT / words[1])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    expected = 1 if any(word in command for word in FAILING) else 0
    assert done.returncode == expected, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_make_has_the_targets_that_are_named() -> None:
    made = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", TEXT):
        assert re.search(rf"^{target}:", made, re.M), target


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_the_plan_that_is_shown_is_the_shipped_one() -> None:
    shown = re.search(r"```yaml\n# configs/plans/llama.yaml\n(.*?)```", TEXT, re.S)
    assert shown is not None
    shipped = (ROOT / "configs/plans/llama.yaml").read_text().split("\n", 2)[2]
    assert shown[1].strip() == shipped.strip()
