"""docs/generate.md is followed: a run that saved, and the first commands of the page on it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.recipes.runs import ROOT, SMALL, run_here, typed

TEXT = (ROOT / "docs/generate.md").read_text()
FIRST = re.findall(r"^\$ (.*)$", re.findall(r"```console\n(.*?)```", TEXT, re.S)[0], re.M)


def test_every_key_that_it_names_is_one_of_the_configuration() -> None:
    known = (ROOT / "configs/generate.yaml").read_text()
    for key in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", TEXT, re.M):
        for name in re.findall(r"\w+", key):
            assert f"\n{name}:" in known, name


@pytest.mark.ranks
def test_the_first_commands_write_a_text(tmp_path: Path) -> None:
    (tmp_path / "runs/a").mkdir(parents=True)
    run_here(
        tmp_path / "runs/a", *SMALL, "train.steps=1", "train.checkpoint_every=1", "model.max_seq_len=128"
    )
    assert len(FIRST) == 2
    for line in FIRST:
        _, _, module, *words = shlex.split(line)
        ended = typed(*words, "device=cpu", cwd=tmp_path, module=module, timeout=120)
        assert ended.status == 0, ended.err
        assert ended.out.startswith("def main(") and "from runs/a/checkpoints/step_1, on" in ended.err
