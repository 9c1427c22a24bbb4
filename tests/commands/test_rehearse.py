"""`rehearse`: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallelizer.commands.main import main

SMALL = ("model.dim=32", "model.n_layers=1", "model.hidden_dim=64", "train.seq_len=32", "--steps", "1")


def test_each_rank_is_shown_beside_what_was_predicted(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "parallel=fsdp2_tp2", "--rank", "0,3", *SMALL]) == 0
    printed = capfd.readouterr()
    for part in ("rank 0 of 4", "rank 3 of 4", "predicted", "as planned", "Not seen:"):
        assert part in printed.out
    assert "profiler" not in printed.err


def test_a_page_has_the_rehearsal_beside_the_dry_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "rehearsed.html"
    words = [
        "rehearse",
        "parallel=pp2",
        "model.n_layers=2",
        "--rank",
        "1",
        "--html",
        str(page),
        "hardware=h100",
    ]
    assert main([*words, *(w for w in SMALL if w != "model.n_layers=1")]) == 0
    text = page.read_text()
    assert "Rank 1 of 2 on cpu" in text and "The costliest kernels" in text and 'id="memory"' in text
    assert main(["rehearse", "parallel=tp2", "--html", str(tmp_path / "no" / "x.html"), *SMALL]) == 1
    assert "file-unwritable" in capfd.readouterr().err


def test_in_json_sizes_are_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "--json", "parallel=tp2", *SMALL]) == 0
    [rank] = json.loads(capfd.readouterr().out)["ranks"]
    assert rank["collectives"]["as_planned"] is True
    assert 0 <= rank["memory"]["requested"] - rank["memory"]["predicted"] < 10_000


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--rank", "4"], 1, "ranks are 0 to 3"),
        (["--rank", "x"], 2, "not a list of ranks"),
        (["--steps", "0"], 2, "not a number of steps"),
        (["plan=lama"], 1, "plan-not-found"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_in_words(
    words: list[str], status: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(["rehearse", "parallel=fsdp2_tp2", *words]) == status
    except SystemExit as end:
        assert end.code == status
    printed = capfd.readouterr()
    assert said in printed.err and "Traceback" not in printed.err
