"""docs/data.md is followed as it is written: its files in a folder, its commands there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.chosen import a_fifth
from tests.recipes.runs import ROOT, Ended, command, typed

TEXT = (ROOT / "docs/data.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n# (?!configs/)(\S+)\n(.*?)```", TEXT, re.S))
COMMANDS = re.findall(r"^\$ (.*)$", TEXT, re.M)
TRAIN = [words for words in COMMANDS if "recipes.train" in words]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, and the texts that it speaks of."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    words = (ROOT / "LICENSE").read_text()
    (tmp_path / "notes.txt").write_text(words)
    (tmp_path / "notes").mkdir()
    for number, part in enumerate(words.split("\n\n")):
        (tmp_path / "notes" / f"{number}.txt").write_text(part)
    rows = [json.dumps({"body": part}) for part in words.split("\n\n")]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` does; what is run is forked from this process
    return tmp_path


def run(line: str, here: Path) -> Ended:
    python, *words = shlex.split(line)
    assert python == "python"
    if words[0] != "-m":
        return command(*words, cwd=here)
    small = ["device=cpu", "model.dim=64", "model.hidden_dim=96"] if words[1] == "recipes.train" else []
    return typed(*words[2:], *small, cwd=here, module=words[1], timeout=200)


def needs(line: str) -> None:
    for module, word in (("transformers", "tokenizer"), ("datasets", "hf_dataset")):
        if word in line:
            pytest.importorskip(module, reason="the optional extra `hf`")


def test_links_lead_somewhere_and_the_plan_is_the_shipped_one() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
    for file in re.findall(r"`((?:recipes|configs|docs|tests)/[\w/.]+\.\w+)`", TEXT):
        assert (ROOT / file).exists(), file
    [(name, shown)] = re.findall(r"```yaml\n# (configs/\S+)\n(.*?)```", TEXT, re.S)
    assert shown in (ROOT / name).read_text()
    assert FILES["recipes/own_data.py"] == (ROOT / "recipes/own_data.py").read_text()


@pytest.mark.ranks
@pytest.mark.parametrize("line", a_fifth(TRAIN), ids=str)
def test_a_run_of_the_page_trains(here: Path, line: str) -> None:
    needs(line)
    for word, script in (("tokenizer.json", "make_tokenizer.py"), ("train.bin", "make_bin.py")):
        if word in line:
            made = run(f"python {script}", here)
            assert made.status == 0, made.err
    ended = run(line, here)
    assert ended.status == 0, ended.err
    assert "trained 2 steps" in ended.out
    tokens = ("tokenizer", "data=tokens", "data=bin", "data=rows")
    assert ("nats a token" in ended.out) == any(word in line for word in tokens)


def test_every_command_is_followed() -> None:
    others = [line for line in COMMANDS if line not in TRAIN]
    assert others == [
        "python make_tokenizer.py",
        "python make_bin.py",
        "python -m parallelizer verify model=llama_packed parallel=cp2",
    ]
    assert len(TRAIN) == 9
