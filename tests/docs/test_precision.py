"""docs/precision.md is followed as it is written: its commands print what it shows, and its plans are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.chosen import chosen
from tests.recipes.runs import ROOT, typed

pytest.importorskip("torchao", reason="float8 needs torchao")

TEXT = (ROOT / "docs/precision.md").read_text()
PLANS = re.findall(r"```yaml\n# in the plan\n(.*?)```", TEXT, re.S)
SHOWN = re.findall(r"```console\n\$ python -m parallelizer (.*?)\n(.*?)```", TEXT, re.S)
REFUSED = re.findall(r"\(`(precision-[\w-]+)`", TEXT)


def test_the_page_has_all_of_it() -> None:
    assert [len(PLANS), *(command.split()[0] for command, _ in SHOWN)] == [4, "verify", "plan"]


@pytest.mark.ranks
@pytest.mark.parametrize("number", chosen(range(len(SHOWN)), [1]))
def test_a_command_prints_what_the_page_shows(number: int) -> None:
    command, shown = SHOWN[number]
    done = typed(*shlex.split(command), cwd=ROOT, module="parallelizer", timeout=300)
    assert done.status == 0, done.out + done.err
    rest = done.out
    for line in shown.splitlines():
        if line != "...":
            line = re.sub(r" \([\d.]+ s\)$", "", line)  # how long a proof takes
            before, found, rest = rest.partition(line)
            assert found, f"{line!r} is not printed behind {before[-300:]!r}"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_a_plan_of_the_page_is_proven(number: int, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(PLANS[number])
    setup = ("parallel=fsdp2_tp2",)
    if "hf_qwen3_moe" in PLANS[number]:
        pytest.importorskip("transformers", reason="the optional extra `hf`")
        setup = ("model=hf_qwen3_moe", "parallel=fsdp2_ep2")
    words = ("verify", "plan=./mine.yaml", *setup)
    done = typed(*words, cwd=tmp_path, module="parallelizer", timeout=300)
    assert done.status == 0 and "\nproven: " in done.out, done.out + done.err


def test_every_refusal_of_the_page_is_a_code_and_every_code_is_on_the_page() -> None:
    codes = re.findall(r"^#+ (precision-[\w-]+)$", (ROOT / "docs/diagnostics.md").read_text(), re.M)
    assert sorted([*REFUSED, "precision-recipe"]) == sorted({*codes})
