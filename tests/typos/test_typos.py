"""A sample of the typos in shipped plans, and that the sweep sees what survives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.typos.edits import PRINTABLE, Typo, typos
from tests.typos.sweep import ROOT, check, shipped, sweep
from tests.typos.table import named, shares, table
from tests.typos.words import CLAIMED, Word, words_of

LLAMA = ROOT / "configs" / "plans" / "llama.yaml"


def test_a_sample_of_typos_is_told() -> None:
    results = list(sweep([LLAMA], seed=0, draws=1, most=60))
    assert len(results) == 60
    assert shares(results)[1] >= 0.95, named(results)
    assert "together" in table(results)


def test_words_stand_where_they_are_said_to() -> None:
    for path in shipped():
        lines = path.read_text().split("\n")
        words = words_of(path)
        assert all(lines[w.line][w.column :].startswith(w.text) for w in words)
        assert words
    kinds = {word.kind for path in shipped() for word in words_of(path)}
    assert set(CLAIMED) <= kinds
    line = next(
        number for number, text in enumerate(LLAMA.read_text().split("\n")) if text.startswith("  norm:")
    )
    assert [(w.kind, w.text) for w in words_of(LLAMA) if w.line == line] == [
        ("glob", "norm"),
        ("option", "style"),
        ("style", "sequence"),
        ("option", "layout"),
        ("option's value", "stream"),
    ]


def test_every_typo_is_one_character_off() -> None:
    word = Word("style", "fsdp", 3, 4)
    found = typos(word, "x", 0, 3)
    spelt = {(typo.how, typo.spelt) for typo in found}
    assert {("deletion", "sdp"), ("deletion", "fsd"), ("swap", "sfdp"), ("swap", "fspd")} <= spelt
    assert len({typo.spelt for typo in found}) == len(found) and all(t.spelt != "fsdp" for t in found)
    assert {len(t.spelt) for t in found if t.how == "insertion"} == {5}
    assert {len(t.spelt) for t in found if t.how in ("swap", "substitution")} == {4}
    assert found == typos(word, "x", 0, 3) != typos(word, "x", 1, 3)
    assert len(PRINTABLE) == 95


@pytest.mark.parametrize(
    ("spelt", "caught", "same"),
    [
        ("nrm", "right", False),
        ("n*rm", "survived", True),
        ("norm.", "right", False),
        ("#norm", "survived", False),
    ],
)
def test_what_survives_is_seen(
    spelt: str, caught: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.typos.sweep._validate", lambda arguments: ())
    word = next(word for word in words_of(LLAMA) if word.text == "norm")
    result = check(LLAMA, Typo(word, "?", spelt), tmp_path)
    assert (result.caught, result.same) == (caught, same), result
    assert bool(named([result])) == (caught != "right")
