"""What a person sees of a run in a file: a line for each step that is due. (The bar: test_train.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.data.source import Baseline
from recipes.progress import Progress, summary
from recipes.result import Result
from recipes.settings import Settings

TEXT = Baseline(3.0, "the unigram entropy of that text", "nats a byte")


def settings(**changed: int) -> Settings:
    values = {"steps": 5, "seed": 0, "eval_every": 0, "eval_batches": 1, "log_every": 1, "warmup": 0}
    rest = {
        "lr": 0.1,
        "final_ratio": 1.0,
        "start_timeout": 1.0,
        "collective_timeout": 1.0,
        "max_cpu_ranks": 1,
    }
    return Settings(**{**values, **rest, **changed})  # type: ignore[arg-type]


def lines(capsys: pytest.CaptureFixture[str], *, quiet: bool = False, **changed: int) -> list[str]:
    with Progress(settings(**changed), quiet=quiet) as progress:
        for step in range(1, 6):
            measured = {"step": step, "loss": 5.0, "grad_norm": 1.5, "lr": 0.1, "tokens_per_second": 1234.5}
            progress.step(measured | ({"validation_loss": 4.0} if step == 5 else {}))
    return capsys.readouterr().out.splitlines()


def test_a_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    shown = lines(capsys)
    assert shown[0] == "step 1/5  loss 5.0000  grad norm 1.500  1,234 tokens/s"
    assert shown[4] == "step 5/5  loss 5.0000  grad norm 1.500  1,234 tokens/s  validation 4.0000"
    assert len(shown) == 5


def test_first_and_last_step_are_always_due(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[1] for line in lines(capsys, log_every=3)] == ["1/5", "3/5", "5/5"]


def test_nothing_when_nothing_is_asked_or_others_speak(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, log_every=0) == []
    assert lines(capsys, quiet=True) == []


@pytest.mark.parametrize(("validation", "verdict"), [(2.9, ", below"), (3.1, ", not yet below")])
def test_the_summary_compares_with_the_unigram_entropy(
    validation: float, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary(Result((5.0, 4.0, 3.0), validation, TEXT, 1.25), Path("/somewhere/else"))
    shown = capsys.readouterr().out
    assert "trained 3 steps in 1.2 s: loss 5.0000 -> 3.0000" in shown
    assert f"validation loss {validation:.4f}{verdict} the unigram entropy of that text, 3.0000" in shown
    assert shown.endswith("outputs in /somewhere/else\n")


def test_the_summary_s_folder_is_relative_where_it_can_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    summary(Result((5.0, 3.0), 2.0, TEXT, 1.25), tmp_path / "outputs" / "a")
    assert capsys.readouterr().out.endswith("outputs in outputs/a\n")
