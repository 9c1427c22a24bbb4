"""docs/your_own_model.md is followed word by word: its files in an empty folder, its commands there.

The default run holds the cheap commands; the others are slow.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.chosen import chosen
from tests.docs.figures import without_figures
from tests.recipes.runs import COMMANDS, Ended, command, typed

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/your_own_model.md").read_text()
FAILING = "norm2: none"
"""In the command that is shown because it fails."""

FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", TEXT, re.S))
CONSOLE = "".join(re.findall(r"```console\n(.*?)```", TEXT, re.S))
SHOWN = dict(re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", CONSOLE, re.M))
PLAN = "mine/plans/my_gpt.yaml"


def is_cheap(command: str) -> bool:
    return command.split()[3] == "validate"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` does; what is run is forked from this process
    return tmp_path


def run(line: str, here: Path) -> Ended:
    python, m, module, *words = shlex.split(line)
    assert (python, m) == ("python", "-m") and module in COMMANDS
    return typed(*words, cwd=here, module=module, timeout=300)


def test_the_page_has_all_of_it() -> None:
    assert set(FILES) == {"my_gpt.py", "mine/model/my_gpt.yaml", PLAN, "conf/app.yaml", "app.py"}
    words = [command.split()[2:4] for command in SHOWN]
    for wanted in ("init", "validate", "plan", "verify"):
        assert ["parallelizer", wanted] in words
    assert any(module == "recipes.train" for module, _ in words)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
    for file in re.findall(r"`((?:recipes|configs|docs|tests)/[\w/.]+\.\w+)`", TEXT):
        assert (ROOT / file).exists(), file


@pytest.mark.ranks
@pytest.mark.parametrize(
    "line", chosen([c for c in SHOWN if " > " not in c], [c for c in SHOWN if is_cheap(c)])
)
def test_the_command_does_what_is_shown(line: str, here: Path) -> None:
    more = " train.steps=1 train.eval_batches=1" if "recipes.train" in line else ""
    done = run(line + more, here)
    assert done.status == (1 if FAILING in line else 0), done.out + done.err
    if is_cheap(line):
        assert without_figures(done.err + done.out) == without_figures(SHOWN[line])
    if " verify " in line:
        assert "\nproven: the sharded run equals the unsharded one" in done.out


@pytest.mark.ranks
@pytest.mark.slow
def test_the_application_trains_under_torchrun(here: Path) -> None:
    for name in ("model/my_gpt.yaml", "plans/my_gpt.yaml"):
        (here / "conf" / name).parent.mkdir(exist_ok=True)
        (here / "conf" / name).write_text(FILES[f"mine/{name}"])
    for line in re.findall(r"^    torchrun (.*)", TEXT, re.M):
        words = ["-m", "torch.distributed.run", *shlex.split(line)]
        done = command(*words, cwd=here, timeout=300)
        assert done.status == 0, done.err
        losses = [float(loss) for loss in re.findall(r"^step \d  loss (\S+)", done.out, re.M)]
        assert len(losses) == 3 and losses[2] < losses[0]


@pytest.mark.ranks
def test_init_proposes_the_plan_that_is_shown(here: Path) -> None:
    [line] = [c for c in SHOWN if " > " in c]
    line, _, written = line.partition(" > ")
    (here / written).unlink()
    done = run(f"{line} --seconds 250", here)
    assert done.status == 0, done.err
    assert yaml.safe_load(done.out) == yaml.safe_load(FILES[PLAN])
