"""`rehearse`: what it prints, and its exit status."""

from __future__ import annotations

import json

import pytest

from parallelizer.commands.main import main

SMALL = ("model.dim=32", "model.n_layers=1", "model.hidden_dim=64", "train.seq_len=32", "--steps", "1")


def test_each_rank_is_shown_beside_what_was_predicted(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "parallel=fsdp2_tp2", "--rank", "0,3", *SMALL]) == 0
    printed = capfd.readouterr()
    for part in ("rank 0 of 4", "rank 3 of 4", "predicted", "as planned", "Not seen:"):
        assert part in printed.out
    assert "profiler" not in printed.err


def test_in_json_sizes_are_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "--json", "parallel=tp2", *SMALL]) == 0
    [rank] = json.loads(capfd.readouterr().out)["ranks"]
    assert rank["collectives"]["as_planned"] is True
    assert 0 <= rank["memory"]["requested"] - rank["memory"]["predicted"] < 10_000


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--rank", "4"], 1, "ranks are 0 to 3"),
        (["--rank", "x"], 2, "no list of ranks"),
        (["--steps", "0"], 2, "no number of steps"),
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
