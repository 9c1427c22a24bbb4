"""Started by torchrun, the command joins the ranks that are there: one folder, one plan, one message."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

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
    monkeypatch.setattr("recipes.outcome.PATIENCE", 0.1)
    [only] = ranks([1], "parallel=tp22", cwd=tmp_path)
    assert only.status == 1
    assert only.err.startswith("rank 1:\nerror[unknown-preset]")


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
