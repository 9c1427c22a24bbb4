"""Every command that the README shows runs; every file that it links to is there.

The default run holds the cheap ones. Those behind a figure are in tests/docs/test_figures.py.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.chosen import chosen
from tests.recipes.runs import COMMANDS, Ended, command, typed

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
FAILING = {"atention", "ffn_norm: none"}
"""Commands with one of these words are shown because they fail."""


def commands() -> list[str]:
    """The lines with a prompt in `console` blocks."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.S):
        found += [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    return list(dict.fromkeys(found))


def is_cheap(line: str) -> bool:
    """Whether it takes a second or two: no ranks, no large model, nothing measured."""
    return line.split()[2:4] in (["parallelizer", "validate"], ["parallelizer", "explain"])


@pytest.mark.ranks
@pytest.mark.parametrize("line", chosen(commands(), [c for c in commands() if is_cheap(c)]))
def test_the_command_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, *words = shlex.split(line)
    assert python == "python"
    if "recipes.train" in words:
        words.append("train.eval_batches=1")
        words += [] if any(w.startswith("train.steps") for w in words) else ["train.steps=1"]
    monkeypatch.setenv("COLUMNS", "100")
    done = run(words, tmp_path)
    expected = 1 if any(word in line for word in FAILING) else 0
    assert done.status == expected, done.out + done.err
    assert "Traceback" not in done.err


def run(words: list[str], folder: Path) -> Ended:
    """What follows `python`; the commands of this repository in a fork, which need not import torch again."""
    if words[0] == "-m" and words[1] in COMMANDS:
        return typed(*words[2:], cwd=folder, module=words[1], timeout=300)
    return command(*words, cwd=folder, timeout=300)


def test_make_has_the_targets_that_are_named() -> None:
    made = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", TEXT):
        assert re.search(rf"^{target}:", made, re.M), target


def test_it_is_read_in_two_minutes() -> None:
    assert len(TEXT.splitlines()) <= 200


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_the_plan_that_is_shown_is_the_shipped_one() -> None:
    shown = re.search(r"```yaml\n# configs/plans/llama.yaml\n(.*?)```", TEXT, re.S)
    assert shown is not None
    shipped = (ROOT / "configs/plans/llama.yaml").read_text().split("\n", 2)[2]
    assert shown[1].strip() == shipped.strip()


OWN = """
    from torch import nn
    from torch.nn.functional import gelu


    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(gelu(self.up(x)))


    class MyModel(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
            self.blocks = nn.ModuleList(Block(width) for _ in range(2))

        def forward(self, input_ids):
            x = self.embed(input_ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)
"""


@pytest.mark.ranks
def test_a_model_of_one_s_own_is_used_as_the_text_says(tmp_path: Path) -> None:
    (tmp_path / "my_package.py").write_text(textwrap.dedent(OWN))
    for name, text in re.findall(r"```yaml\n# (mine/\S+)\n(.*?)```", TEXT, re.S):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = re.findall(r"^    parallelizer (.* --config-dir mine .*)$", TEXT, re.M)
    assert len(lines) == 2
    for line in lines:
        more = ["train.steps=1", "train.eval_batches=1"] if line.startswith("train ") else []
        done = run(["-m", "parallelizer", *shlex.split(line), *more], tmp_path)
        assert done.status == 0, done.out + done.err


def test_make_train_installs_the_package_alone_and_make_test_everything(tmp_path: Path) -> None:
    def installed(target: str) -> list[str]:
        words = ["make", "--dry-run", "--no-print-directory", target, f"VENV={tmp_path / 'venv'}"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        return re.findall(r"--constraint constraints\.txt --editable (.+)", done.stdout)

    assert installed("train") == ["."]
    alone, whole = installed("test")
    assert alone == "." and {"dev", "hf", "docs"} < set(re.findall(r"\w+", whole))
    for target in ("test-all", "test-wheel", "parity", "loops", "matrix", "docs", "lint"):
        assert installed(target) == [alone, whole], target


@pytest.mark.parametrize("gpu", [False, True])
def test_make_train_takes_torch_for_cpus_where_there_is_no_gpu(tmp_path: Path, gpu: bool) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("make", "sh", "bash"):
        (tools / name).symlink_to(shutil.which(name) or name)
    if gpu:
        (tools / "nvidia-smi").write_text("#!/bin/sh\n")
        (tools / "nvidia-smi").chmod(0o755)
    words = ["make", "--dry-run", "--no-print-directory", "train", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(
        words, cwd=ROOT, env={"PATH": str(tools)}, capture_output=True, text=True, check=True
    )
    [torch] = [line for line in done.stdout.splitlines() if line.endswith(" torch")]
    assert ("https://download.pytorch.org/whl/cpu" in torch) is not gpu
