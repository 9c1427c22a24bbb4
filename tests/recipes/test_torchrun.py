"""Started by torchrun, the command joins the ranks that are there: one folder, one plan, one message."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from parallelizer.training.guards import Guards
from tests.recipes.runs import SMALL, Ended, command, entries, metrics, run_command, run_here

pytestmark = pytest.mark.ranks


def test_torchrun_runs_the_same_command(tmp_path: Path) -> None:
    ended = command(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "recipes.train",
        *SMALL, "parallel=tp2", "train.steps=2", cwd=tmp_path,
    )  # fmt: skip
    assert ended.status == 0, ended.err
    assert ended.out.count("mesh  2 ranks: tp=2") == 1
    assert ended.out.count("step 2/2") == ended.out.count("trained 2 steps") == 1
    [folder] = tmp_path.glob("outputs/*/*")
    assert [p.name for p in sorted(folder.iterdir())] == [".hydra", "metrics.jsonl"]
    alone = tmp_path / "alone"
    alone.mkdir()
    run_here(alone, "train.steps=2", "train.log_every=0")
    got, expected = ([m["loss"] for m in metrics(run)] for run in (folder, alone))
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["parallel=tp4"], "error[world-size]: the mesh has 4 ranks (tp=4), torchrun started 2"),
        (["parallel=tp2", 'rules=["layers.*: chekpoint"]'], "error[unknown-style]"),
        (["parallel=tp22"], "error[unknown-preset]"),
        (["parallel=tp2", "data.path=/nowhere"], "error[data-not-found]"),
        (["parallel=tp2", "device=cuda"], "error: rank 0 was started where there is no GPU"),
        (["-m", "parallel=tp2,single"], "error: torchrun has started the ranks of one job"),
    ],
)
def test_one_message_of_all_ranks(arguments: list[str], what: str, tmp_path: Path) -> None:
    first, second = two_ranks(*SMALL[:-1], *arguments, cwd=tmp_path)
    assert first.status == 1
    assert what in first.err and "Traceback" not in first.err
    assert first.err.count("error") <= 2  # the message, and the line that counts
    assert second.status == -signal.SIGTERM  # it waited for the launcher to end it
    assert second.out == second.err == ""
    assert entries(tmp_path) == []


def test_a_rank_other_than_0_speaks_when_rank_0_has_nothing_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallelizer.training.job.outcome.PATIENCE", 0.1)
    [only] = ranks([1], "parallel=tp22", cwd=tmp_path)
    assert only.status == 1
    assert only.err.startswith("rank 1:\nerror[unknown-preset]")


class Broken(Guards):
    """Guards on which rank 1 fails behind its second step, in one way or another."""

    how = ""

    def after(self, step: int, *told: Any, **more: Any) -> int:
        if step == 2 and os.environ["RANK"] == "1":
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the reason\nin two lines")
        return super().after(step, *told, **more)


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_the_rank_that_fails_says_why_and_the_one_that_lost_it_leaves_its_traceback_in_its_log(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "how", how)
    monkeypatch.setattr("parallelizer.training.job.job.Guards", Broken)
    first, second = two_ranks(*SMALL, "parallel=tp2", "train.steps=100", "hydra.run.dir=a", cwd=tmp_path)
    log = (tmp_path / "a" / "rank0.log").read_text()
    assert "Traceback" in log and "by peer" in log and "in the loss" not in log
    # It waits for the launcher to end it, so that nothing stands before what rank 1 says.
    assert "Traceback" not in first.err and "Error executing job" not in first.err
    assert len(first.err.splitlines()) <= 2
    if how == "killed":
        assert second.status == -signal.SIGKILL and second.err == ""
        return
    assert second.status == 1
    lines = second.err.splitlines()
    assert lines[0] == "error: rank 1 of 2 failed (exit code 1): ValueError: the reason"
    assert lines[2] == "Traceback (most recent call last):" and "recipes/train.py" in second.err
    assert "hydra" not in second.err.partition("= help")[0].replace("hydra.run.dir", "")
    assert lines[-1].endswith("its traceback is whole in " + str(Path("a") / "rank1.log"))
    assert "in two lines" in (tmp_path / "a" / "rank1.log").read_text()


def two_ranks(*arguments: str, cwd: Path) -> list[Ended]:
    """Both ranks of a job as torchrun starts them; when rank 0 has ended, the other is ended."""
    return ranks([0, 1], *arguments, cwd=cwd)


def ranks(numbers: list[int], *arguments: str, cwd: Path, timeout: float = 30.0) -> list[Ended]:
    """Some ranks of a job of two, forked from this process with the environment that torchrun gives them."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    running = []
    for rank in numbers:
        out, err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - closed below
        pid = os.fork()
        if pid == 0:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            run_command(arguments, cwd, out.fileno(), err.fileno())
        running.append((pid, out, err))
    statuses: dict[int, int] = {}
    until = time.monotonic() + timeout
    while len(statuses) < len(running):
        for pid, _, _ in running:
            if pid not in statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
                elif statuses or time.monotonic() > until:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)
    found = []
    for pid, out, err in running:
        with out, err:
            out.seek(0)
            err.seek(0)
            found.append(Ended(statuses[pid], out.read(), err.read()))
    return found
