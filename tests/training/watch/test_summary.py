"""The last lines of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelizer import losses
from parallelizer.training.data.source import Baseline
from parallelizer.training.watch.memory import Memory
from parallelizer.training.watch.result import Result
from parallelizer.training.watch.summary import is_cross_entropy, summary

TEXT = Baseline(3.0, "the unigram entropy of that text", "nats a byte")


def said(capsys: pytest.CaptureFixture[str], *losses: float, **known: Any) -> list[str]:
    summary(Result(losses, known.pop("validation", None), TEXT, 1.25, **known), Path("/somewhere/else"))
    return capsys.readouterr().out.splitlines()[1:]


@pytest.mark.parametrize(("validation", "verdict"), [(2.9, ", below"), (3.1, ", not yet below")])
def test_the_summary_compares_with_the_unigram_entropy(
    validation: float, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary(Result((5.0, 4.0, 3.0), validation, TEXT, 1.25), Path("/somewhere/else"))
    shown = capsys.readouterr().out
    assert "trained 3 steps in 1.2 s: loss 5.0000 -> 3.0000" in shown
    assert f"validation loss {validation:.4f}{verdict} the unigram entropy of that text, 3.0000" in shown
    assert shown.endswith("outputs in /somewhere/else\n")


def squared(output: Any, batch: Any) -> Any:
    return (output - batch["y"]).pow(2).sum(), output.numel()


def test_a_loss_that_is_no_cross_entropy_is_compared_with_no_entropy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said(capsys, 5.0, validation=2.9, nats=False)[-2] == "validation loss 2.9000"
    assert is_cross_entropy(losses.cross_entropy) and is_cross_entropy(losses.classification)
    assert is_cross_entropy(torch.nn.functional.nll_loss) and not is_cross_entropy(squared)


def test_the_summary_s_folder_is_relative_where_it_can_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    summary(Result((5.0, 3.0), 2.0, TEXT, 1.25), tmp_path / "outputs" / "a")
    assert capsys.readouterr().out.endswith("outputs in outputs/a\n")


def test_tokens_and_their_rate_without_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, 5.0, 4.0, 3.0, 3.5, rates=(1.0, 1000.0, 3000.0, 2000.0), tokens=512, mfu=0.4123)
    assert lines[1] == "  lowest loss 3.0000, at step 3"
    assert lines[2] == "  2,048 tokens, 2,000 a second (quartiles 1,500 to 2,500), MFU 41.2%"
    both = said(capsys, 5.0, 4.0, rates=(1.0, 2000.0), tokens=512, mfu=0.4123, causal_mfu=0.381)
    assert both[2].endswith(", MFU 41.2% (38.1% without the masked half of attention)"), both


def test_the_lowest_loss_is_a_finite_one_and_counts_from_the_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = said(capsys, math.nan, 4.0, 4.5, first=10, skipped=1)
    assert lines[1:3] == ["  lowest loss 4.0000, at step 12", "  1 step skipped: not finite"]
    assert said(capsys, math.nan, math.nan, skipped=2)[1] == "  2 steps skipped: not finite"


def test_memory_is_compared_where_it_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  rank 0 had 61.0 GiB in use at most, 61.2 GiB predicted" in said(
        capsys, 1.0, memory=Memory(1 << 30, 61 << 30), predicted=int(61.2 * 2**30)
    )
    assert (
        "  rank 0 had 61.0 GiB in use at most, 61.2 GiB predicted; its allocator reserved 66.5 GiB"
        in said(
            capsys,
            1.0,
            memory=Memory(1 << 30, 61 << 30, reserved=int(66.5 * 2**30)),
            predicted=int(61.2 * 2**30),
        )
    )
    assert "  rank 0's process had 2.0 GiB in use at most" in said(
        capsys, 1.0, memory=Memory(1 << 30, 2 << 30, whole=True), predicted=1 << 30
    )


def test_where_what_was_written_lies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = said(capsys, 1.0, checkpoint=tmp_path / "step_20", profiled=tmp_path / "profile")
    assert f"  saved after step 20, in {tmp_path}/step_20" in lines
    assert f"  traces for Perfetto in {tmp_path}/profile" in lines


def test_a_run_with_nothing_left_to_do_says_only_that(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, first=60, memory=Memory(1, 1))
    assert lines == ["no step was left to train: all 60 are done", "outputs in /somewhere/else"]
