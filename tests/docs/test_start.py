"""docs/index.md is followed word by word: its commands, one after the other, in the folder that the first one makes.

Those that start ranks or trace a step are slow; `tests/wheel/test_life.py` goes all the way
from a wheel.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from tests.chosen import chosen
from tests.docs.commands import check
from tests.recipes.runs import Ended, typed

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/index.md").read_text()
CONSOLE = "".join(re.findall(r"```console\n(.*?)```", TEXT, re.S))
SHOWN = dict(re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", CONSOLE, re.M))
INSTALL, NEW, CHANGE, *COMMANDS, SAMPLE = SHOWN
CHEAP = [c for c in COMMANDS if " explain " in c or (" validate " in c and "atention" in c)]
"""They trace nothing."""
FAILING = ("atention", "norm2: none")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that `new` makes, as the place where a command runs."""
    monkeypatch.setenv("COLUMNS", "100")
    done = run(NEW, tmp_path)
    assert done.status == 0 and f"\n    {CHANGE}\n" in done.out, done.out + done.err
    folder = tmp_path / CHANGE.removeprefix("cd ")
    monkeypatch.syspath_prepend(str(folder))  # as the command does; what is run is forked from this process
    monkeypatch.delitem(sys.modules, "my_gpt", raising=False)
    return folder


def run(command: str, folder: Path) -> Ended:
    words = shlex.split(command)
    if words[0] == "parallelizer":
        return typed(*words[1:], cwd=folder, module="parallelizer", timeout=300)
    assert words[:3] == ["python", "-m", "recipes.train"]
    # As the folder's own recipe, which looks into its conf by itself; a short run of a small model.
    more = [
        "train.steps=1",
        "train.eval_batches=1",
        "train.batch_size=4",
        "train.seq_len=64",
        "model.layers=1",
    ]
    return typed("--config-dir", "conf", *words[3:], *more, "device=cpu", cwd=folder, timeout=300)


def test_it_is_the_package_that_is_installed() -> None:
    assert INSTALL == "pip install path/to/parallelizer" and NEW.startswith("parallelizer new ")


def test_what_it_samples_from_is_what_it_trained() -> None:
    """tests/wheel/test_life.py samples behind a training."""
    check(SAMPLE)
    folder = re.findall(r"checkpoint=(\S+)", SAMPLE)
    assert folder and all(f"hydra.run.dir={folder[0]}" in c for c in COMMANDS if "recipes.train" in c)


def test_the_plan_that_is_shown_is_the_one_that_is_written() -> None:
    [shown] = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
    written = (ROOT / "parallelizer/commands/new/starter/conf/plans/my_gpt.yaml").read_text()
    assert yaml.safe_load(shown) == yaml.safe_load(written)


@pytest.mark.ranks
@pytest.mark.parametrize("command", chosen(COMMANDS, CHEAP))
def test_the_command_does_what_is_shown(command: str, here: Path) -> None:
    done = run(command, here)
    assert done.status == any(word in command for word in FAILING), done.out + done.err
    said = (done.err + done.out).strip()
    if command in CHEAP:
        assert said == SHOWN[command].strip()
    if " plan " in command:
        for line in SHOWN[command].splitlines():
            # The page has proven the plan before; here it is the first command of its folder.
            assert line in ("...", *done.out.splitlines()) or line.startswith("proof: proven on ")
    if " verify " in command:
        assert "\nproven: the sharded run equals the unsharded one" in done.out
