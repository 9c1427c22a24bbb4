"""docs/watching.md: its commands run and leave what it says, its links lead somewhere, its keys are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.recipes.runs import ROOT, SMALL, metrics, typed

TEXT = (ROOT / "docs/watching.md").read_text()
COMMANDS = [shlex.split(line.removesuffix(" | cat")) for line in re.findall(r"^\$ (.*)$", TEXT, re.M)]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT):
        assert target.startswith("https:") or (ROOT / "docs" / target).exists(), target


def test_every_key_that_it_names_is_one_of_the_configuration() -> None:
    known = (ROOT / "configs/train.yaml").read_text()
    for key in set(re.findall(r"`(?:train|launch)\.(\w+)", TEXT)):
        assert f"\n  {key}:" in known, key


@pytest.mark.ranks
def test_its_commands_leave_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert [words[:3] for words in COMMANDS] == [["python", "-m", "recipes.train"]] * 2
    profiled, tracked = (typed(*SMALL[:-1], *words[3:], cwd=tmp_path) for words in COMMANDS)
    assert profiled.status == tracked.status == 0, profiled.err + tracked.err
    [block] = re.findall(r"\[the plan, and whether it is proven\]\n(.*?)```", TEXT, re.S)
    shown = [re.sub(r"[\d.,]+", "N", line) for line in block.splitlines()]
    said = {re.sub(r"[\d.,]+", "N", line) for line in profiled.out.splitlines()}
    assert [line for line in shown if line not in said] == []
    assert sorted(p.name for p in (tmp_path / "a/profile").iterdir()) == [
        f"rank{k}.trace.json" for k in range(4)
    ]
    assert len(metrics(tmp_path / "a")) == 6
    assert re.findall(r"^step (\d/4) ", tracked.out, re.M) == ["1/4", "2/4", "4/4"]
    assert list((tmp_path / "b/tensorboard").iterdir())
