"""What a person sees of a run in a file: a line for each step that is due. (The panel: test_live.py, test_train.py.)"""

from __future__ import annotations

import pytest

from parallelizer.training.settings import Settings
from parallelizer.training.watch.live import View
from parallelizer.training.watch.progress import Progress


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


def lines(
    capsys: pytest.CaptureFixture[str], *, quiet: bool = False, done: int = 0, **changed: int
) -> list[str]:
    with Progress(settings(**changed), View("a plan", 5, done=done), quiet=quiet) as progress:
        for step in range(done + 1, 6):
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


def test_the_first_step_behind_a_checkpoint_is_due_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[1] for line in lines(capsys, log_every=10, done=2)] == ["3/5", "5/5"]
