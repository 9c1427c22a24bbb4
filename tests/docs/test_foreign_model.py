"""docs/foreign_model.md is followed: its files in an empty folder, its commands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.chosen import chosen
from tests.docs.figures import without_figures
from tests.recipes.runs import Ended, typed

pytest.importorskip("x_transformers", reason="the model that the page is about is not installed")

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/foreign_model.md").read_text()
FILES = dict(re.findall(r"```yaml\n# (\S+)\n(.*?)```", TEXT, re.S))
CONSOLE = "".join(re.findall(r"```console\n(.*?)```", TEXT, re.S))
SHOWN = dict(re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", CONSOLE, re.M))
PLAN = "conf/plans/decoder.yaml"
FAILING = "split_q_heads: none"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run(command: str, here: Path) -> Ended:
    _, _, module, *words = shlex.split(command)
    return typed(*words, cwd=here, module=module, timeout=300)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "command",
    chosen([c for c in SHOWN if " init " not in c], [c for c in SHOWN if " validate " in c]),
)
def test_the_command_does_what_is_shown(command: str, here: Path) -> None:
    more = " train.steps=1 train.eval_batches=1" if "recipes.train" in command else ""
    done = run(command + more, here)
    assert done.status == (FAILING in command), done.out + done.err
    assert "Traceback" not in done.err and "built-whole" not in done.err
    if " verify " in command:
        shown, _, _ = SHOWN[command].partition("...\n")
        assert done.out.startswith(shown) and "\nproven: " in done.out
    elif FAILING not in command and " validate " in command:
        assert without_figures(done.out) == without_figures(SHOWN[command])


@pytest.mark.ranks
@pytest.mark.slow  # half a minute: it tries plans, and proves the last
def test_init_proposes_the_plan_that_is_shown(here: Path) -> None:
    (here / PLAN).unlink()
    [command] = [c for c in SHOWN if " init " in c]
    done = run(f"{command} --seconds 250", here)
    assert done.status == 0, done.err
    assert yaml.safe_load((here / PLAN).read_text()) == yaml.safe_load(FILES[PLAN])
