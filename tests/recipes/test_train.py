"""A training run from its command to its summary, and how it ends when somebody ends it."""

from __future__ import annotations

import os
import pty
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from parallelizer.training import run
from recipes.train import train
from tests.recipes.runs import SMALL, Ended, entries, in_session, metrics, run_here, typed

pytestmark = pytest.mark.ranks


def losses(folder: Path) -> list[float]:
    return [m["loss"] for m in metrics(folder)]


def test_it_learns_and_says_so(tmp_path: Path) -> None:
    ended = typed(*SMALL, "parallel=fsdp2", "train.steps=12", "optim.warmup=2", "optim.lr=5e-3", cwd=tmp_path)
    assert ended.status == 0, ended.err
    [folder] = tmp_path.glob("outputs/*/*")
    measured = metrics(folder)
    assert [m["step"] for m in measured] == list(range(1, 13))
    assert {"step", "loss", "grad_norm", "lr", "tokens_per_second"} <= measured[0].keys()
    assert measured[-1]["loss"] < measured[0]["loss"] - 1.5
    assert measured[-1]["validation_loss"] < measured[0]["loss"] - 1.5
    rates = [m["lr"] for m in measured]
    assert rates[0] == pytest.approx(2.5e-3) and max(rates) == pytest.approx(5e-3) == rates[1]
    assert rates[-1] == pytest.approx(5e-4)
    assert all(m["tokens_per_second"] > 0 for m in measured)

    lines = ended.out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 12 and re.match(
        r"step  1/12  loss \d\.\d{4}  grad norm [\d.]+  [\d,]+ tokens/s$", steps[0]
    )
    first, last = measured[0]["loss"], measured[-1]["loss"]
    [at] = [i for i, line in enumerate(lines) if line.startswith("trained")]
    assert re.match(rf"trained 12 steps in [\d.]+ s: loss {first:.4f} -> {last:.4f}$", lines[at])
    best = min(measured, key=lambda m: m["loss"])
    assert lines[at + 1] == f"  lowest loss {best['loss']:.4f}, at step {best['step']}"
    assert re.match(r"  6,144 tokens, [\d,]+ a second \(quartiles [\d,]+ to [\d,]+\)$", lines[at + 2])
    assert re.match(r"  rank 0's process had [\d.]+ [MG]iB in use at most$", lines[at + 3])
    assert f"validation loss {measured[-1]['validation_loss']:.4f}, " in lines[-2]
    assert "unigram entropy of that text" in lines[-2]
    assert lines[-1] == f"outputs in {folder.relative_to(tmp_path)}"
    assert "\x1b" not in ended.out + ended.err


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        run_here(tmp_path / name, "train.steps=2", "train.log_every=0", f"train.seed={seed}")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a")[0] != losses(tmp_path / "c")[0]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["single", "fsdp2_tp2"])
def test_accumulation_changes_memory_and_nothing_else(preset: str, tmp_path: Path) -> None:
    for parts in (1, 4):
        (tmp_path / str(parts)).mkdir()
        run_here(
            tmp_path / str(parts),
            f"parallel={preset}",
            "train.steps=3",
            "train.log_every=0",
            f"train.accumulate={parts}",
        )
    assert losses(tmp_path / "4") == pytest.approx(losses(tmp_path / "1"), rel=1e-6)


@pytest.mark.parametrize(
    "preset", ["single", "fsdp2_tp2", pytest.param("fsdp2_cp2_tp2", marks=pytest.mark.slow)]
)
def test_bfloat16_trains_close_to_float32(preset: str, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        (tmp_path / dtype).mkdir()
        run_here(
            tmp_path / dtype,
            f"parallel={preset}",
            "train.steps=3",
            "train.log_every=0",
            f"train.dtype={dtype}",
        )
    assert losses(tmp_path / "bfloat16") == pytest.approx(losses(tmp_path / "float32"), rel=1e-2)
    assert losses(tmp_path / "bfloat16") != losses(tmp_path / "float32")


def test_evaluations_come_as_often_as_asked(tmp_path: Path) -> None:
    run_here(tmp_path, "train.steps=5", "train.eval_every=2", "train.log_every=0")
    assert [m["step"] for m in metrics(tmp_path) if "validation_loss" in m] == [2, 4, 5]


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    for name, every in (("with", 1), ("without", 0)):
        (tmp_path / name).mkdir()
        run_here(
            tmp_path / name,
            "parallel=cp2",
            "train.steps=3",
            f"train.eval_every={every}",
            "train.log_every=0",
        )
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


# Ended from outside


def test_ctrl_c_in_a_terminal_ends_every_rank(tmp_path: Path) -> None:
    run = _Terminal(tmp_path, *SMALL, "parallel=fsdp2", "train.steps=100000")
    run.until(lambda text: re.search(r"[3-9]/1000", text) is not None)
    ranks = in_session(run.pid)
    os.write(run.terminal, b"\x03")
    ended = run.end()
    assert len(ranks) == 3  # the parent too
    assert ended.status == 130
    assert "interrupted" in ended.out and "Traceback" not in ended.out
    assert ended.out.rindex("\x1b[?25h") > ended.out.rindex("\x1b[?25l")  # the cursor is there again
    assert in_session(run.pid) == []
    [folder] = tmp_path.glob("outputs/*/*")
    assert len(metrics(folder)) >= 3 and not list(folder.glob("rank*.log"))


def test_ctrl_c_before_the_first_step_leaves_no_folder(tmp_path: Path) -> None:
    run = _Terminal(tmp_path, *SMALL, "parallel=fsdp2", "train.steps=100000")
    run.until(lambda text: "modules" in text)
    os.write(run.terminal, b"\x03")
    ended = run.end()
    assert ended.status == 130
    assert "Traceback" not in ended.out
    assert in_session(run.pid) == []
    assert entries(tmp_path) == []


def test_a_terminated_run_saves_itself_says_how_to_go_on_and_leaves_no_rank(tmp_path: Path) -> None:
    run = _Terminal(tmp_path, *SMALL, "parallel=fsdp2", "train.steps=100000")
    run.until(lambda text: re.search(r"[3-9]/1000", text) is not None)
    os.kill(run.pid, signal.SIGTERM)
    ended = run.end()
    assert ended.status == 75  # what tells a scheduler to queue it again
    assert "Traceback" not in ended.out
    assert in_session(run.pid) == []
    said = re.search(r"stopped by SIGTERM after step (\d+), saved in (\S+): the same command", ended.out)
    assert said is not None
    [folder] = tmp_path.glob("outputs/*/*")
    assert tmp_path / said[2] == folder / "checkpoints" / f"step_{said[1]}"
    assert len(metrics(folder)) == int(said[1])


def test_a_panel_shows_the_run_in_its_place_and_stays_behind(tmp_path: Path) -> None:
    run = _Terminal(tmp_path, *SMALL, "train.steps=40", "train.eval_every=39")
    ended = run.end()
    assert ended.status == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", ended.out)
    last = plain[plain.rindex("╭") : plain.rindex("╯")]
    assert re.search(r"step +40/40.*100%.*ETA 0:00 ", last) and re.search(r"loss +\d\.\d{4}  [▁-█]+", last)
    assert re.search(r"grad norm .*lr .*validation +\d\.\d{4}", last) and re.search(r"tokens/s +[\d,]+", last)
    assert plain.rindex("trained 40 steps") > plain.rindex("╯")
    assert not re.search(r"^step ", plain, re.M)  # no line a step
    # Before each panel the cursor goes up as many lines as the one before it has: none scrolls by.
    frames = ended.out[ended.out.index("╭") :].split("╭")[1:]
    assert len(frames) >= 3
    for frame in frames[:-1]:
        panel, _, behind = frame.partition("╯")
        assert behind.count("\x1b[1A") == panel.count("\n") >= 5


class _Terminal:
    """The command in a terminal of its own, forked from this process."""

    def __init__(self, cwd: Path, *arguments: str) -> None:
        self.text = ""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            status = 1
            try:
                os.environ |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
                os.chdir(cwd)
                sys.argv = ["train.py", *arguments]
                sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 - until the process ends
                run(train)
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def until(self, seen: Callable[[str], bool], timeout: float = 30.0) -> None:
        """Read on until `seen` says that enough was written."""
        end = time.monotonic() + timeout
        while not seen(self.text):
            if time.monotonic() > end or not self._read():
                raise TimeoutError(self.text)

    def end(self) -> Ended:
        """Read to the end, and wait for the command's."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self.terminal)
        return Ended(os.waitstatus_to_exitcode(status), self.text, "")

    def _read(self) -> bool:
        try:
            piece = os.read(self.terminal, 65536)
        except OSError:  # nobody has the other end open any more
            return False
        self.text += piece.decode(errors="replace")
        return bool(piece)
