"""Ranks that torchrun or Slurm started: recognised from the environment, and joined."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import runpy
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from parallelizer.runtime.launch import outside, records
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.launch.heartbeat import beat
from parallelizer.runtime.launch.outside import OutsideRanks, join, outside_ranks
from parallelizer.runtime.launch.slurm_step import first_host, port, tasks_per_node

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29501",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "gpu[007-010]",
}


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*TORCHRUN, *os.environ):
        if name in TORCHRUN or name.startswith("SLURM_") or name == "ENVIRONMENT":
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("parallelizer.runtime.launch.slurm_step._resolves", lambda name: True)
    return monkeypatch


def set_all(env: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        env.setenv(name, value)


def test_a_process_of_its_own_is_no_rank(env: pytest.MonkeyPatch) -> None:
    assert outside_ranks() is None


def test_torchrun_is_recognised(env: pytest.MonkeyPatch) -> None:
    set_all(env, TORCHRUN)
    assert outside_ranks() == OutsideRanks(5, 8, 1, "torchrun", "head", 29501, (4, 4))


def test_part_of_torchruns_variables_is_not_torchrun(env: pytest.MonkeyPatch) -> None:
    set_all(env, {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE")})
    assert outside_ranks() is None


def test_srun_is_recognised(env: pytest.MonkeyPatch) -> None:
    set_all(env, SRUN)
    ranks = outside_ranks()
    assert ranks == OutsideRanks(5, 8, 1, "slurm", "gpu007", ranks.port)
    assert 10000 <= ranks.port < 30000


def test_slurms_ranks_meet_on_the_first_node_of_their_step(env: pytest.MonkeyPatch) -> None:
    set_all(env, {**SRUN, "SLURM_STEP_NODELIST": "node7,node8"})  # a step on the last nodes of its job
    assert outside_ranks().address == "node7"
    set_all(env, {"SLURM_STEP_NODELIST": "node9", "SLURM_STEP_NUM_NODES": "1"})
    assert outside_ranks().address == "127.0.0.1"  # none but this one


def test_ranks_of_slurm_are_counted_node_by_node(env: pytest.MonkeyPatch) -> None:
    set_all(
        env, {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1,1", "SLURM_NODEID": "2", "SLURM_LOCALID": "1"}
    )
    ranks = outside_ranks()
    assert (ranks.rank, ranks.nodes) == (5, (2, 2, 2, 1, 1))
    set_all(env, {"SLURM_STEP_TASKS_PER_NODE": "2(x"})
    with pytest.raises(LaunchError, match="SLURM_STEP_TASKS_PER_NODE"):
        outside_ranks()


@pytest.mark.parametrize(
    ("text", "counts"), [("4", (4,)), ("4(x2),1", (4, 4, 1)), ("1,2(x1)", (1, 2)), ("12(x3)", (12, 12, 12))]
)
def test_tasks_per_node(text: str, counts: tuple[int, ...]) -> None:
    assert tasks_per_node(text) == counts


def test_jobs_and_steps_at_one_time_have_ports_of_their_own(env: pytest.MonkeyPatch) -> None:
    found = {port({}, 900000 + job, step) for job, step in itertools.product(range(100), range(40))}
    assert len(found) == 4000
    assert all(10000 <= one < 30000 for one in found)
    assert port({"SLURM_STEP_RESV_PORTS": "12001-12002"}, 1, 0) == 12001


def test_torchrun_inside_slurm_wins(env: pytest.MonkeyPatch) -> None:
    set_all(env, SRUN)
    set_all(env, TORCHRUN)
    ranks = outside_ranks()
    assert ranks is not None
    assert ranks.launcher == "torchrun"


def test_an_address_that_is_set_is_kept_under_slurm(env: pytest.MonkeyPatch) -> None:
    set_all(env, {**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "4000"})
    ranks = outside_ranks()
    assert ranks is not None
    assert (ranks.address, ranks.port) == ("head", 4000)


def test_a_step_smaller_than_its_job_has_its_own_size(env: pytest.MonkeyPatch) -> None:
    set_all(env, {**SRUN, "SLURM_STEP_NUM_TASKS": "6"})
    ranks = outside_ranks()
    assert ranks is not None
    assert ranks.world_size == 6


@pytest.mark.parametrize("variables", [{"SLURM_NTASKS": "1"}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_a_single_task_is_no_rank(env: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    set_all(env, {**SRUN, **variables})
    assert outside_ranks() is None


def test_the_batch_script_itself_is_no_rank(env: pytest.MonkeyPatch) -> None:
    script = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    set_all(env, {**script, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"})
    assert outside_ranks() is None
    env.setenv("SLURM_STEP_ID", "0")
    assert outside_ranks() is not None


def test_a_value_that_is_no_number_is_told(env: pytest.MonkeyPatch) -> None:
    set_all(env, {**TORCHRUN, "RANK": "first"})
    with pytest.raises(LaunchError, match="RANK is 'first', which is no number"):
        outside_ranks()


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-012,020],login1", "gpu007"),
        ("gpu[3,5-7]-ib", "gpu3-ib"),
        ("rack[0-1]n[01-16]", "rack0n01"),
        ("a-b[1-2].cluster.org,c", "a-b1.cluster.org"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_joining_without_ranks_is_refused(env: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="not started as one of several ranks"):
        join(lambda: None, device="cpu")


SCRIPT = """
    import os, sys
    import torch, torch.distributed as dist
    from parallelizer.runtime.launch.outside import join, outside_ranks

    def worker(folder):
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        path = os.path.join(folder, str(dist.get_rank()))
        found = outside_ranks()
        text = f"{found.launcher} {found.local_rank} {os.environ['LOCAL_RANK']} {total.item()}"
        open(path, "w").write(text)
        return dist.get_rank()

    assert join(worker, (sys.argv[1],), device="cpu", collective_timeout=60) == outside_ranks().rank
    assert not dist.is_initialized()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "joins.py"
    path.write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "out").mkdir()
    return path


def run_both(task: Callable[[int], None]) -> None:
    """Two ranks that end well, forked, so that they need not import torch again."""
    tasks = [multiprocessing.get_context("fork").Process(target=task, args=(rank,)) for rank in range(2)]
    for one in tasks:
        one.start()
    for one in tasks:
        one.join(120)
    assert [one.exitcode for one in tasks] == [0, 0]


def written(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.ranks
@pytest.mark.slow  # as the recipe does in tests/recipes/test_torchrun.py
def test_ranks_of_torchrun_join(script: Path, env: pytest.MonkeyPatch) -> None:
    out = script.parent / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, str(script), str(out)], check=True, timeout=120, capture_output=True)
    assert written(out) == {"0": "torchrun 0 0 3.0", "1": "torchrun 1 1 3.0"}


@pytest.mark.ranks
def test_tasks_of_slurm_join(script: Path, env: pytest.MonkeyPatch) -> None:
    out = script.parent / "out"
    job = {**SRUN, "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "127.0.0.1", "SLURM_JOB_ID": str(os.getpid())}

    def task(rank: int) -> None:
        os.environ.update(job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
        sys.argv = [str(script), str(out)]
        runpy.run_path(str(script), run_name="__main__")

    run_both(task)
    # Inside the worker the environment is torchrun's.
    assert written(out) == {"0": "torchrun 0 0 3.0", "1": "torchrun 1 1 3.0"}


@pytest.mark.ranks
def test_ranks_whose_agents_count_restarts_differently_meet_in_a_new_store(env: pytest.MonkeyPatch) -> None:
    """The agent of a node whose ranks were ended because those of another node failed does not count the restart."""

    def task(rank: int) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", TORCHELASTIC_RUN_ID="none")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(30000 + os.getppid() % 20000))
        os.environ.update(TORCHELASTIC_RESTART_COUNT=str(rank), TORCHELASTIC_USE_AGENT_STORE="False")
        join(dist.barrier, device="cpu", collective_timeout=20)

    run_both(task)


@pytest.mark.ranks
def test_a_joined_rank_that_stands_still_says_where(tmp_path: Path, env: pytest.MonkeyPatch) -> None:
    def worker() -> None:
        beat(3)
        if dist.get_rank() == 1:
            time.sleep(1)
        dist.barrier()

    def task(rank: int) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(10000 + os.getppid() % 20000))
        sys.stderr = open(tmp_path / str(rank), "w")  # noqa: SIM115
        join(worker, device="cpu", collective_timeout=60, stuck_after=0.3)

    run_both(task)
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert first.startswith("warning: rank 0 of 2: no progress for 0 s in step 3; its stack:\n")
    assert "dist.barrier()" in first and "time.sleep(1)" in second


@pytest.mark.parametrize(
    ("seen", "launcher", "told"), [(1, "slurm", True), (8, "slurm", False), (1, "torchrun", False)]
)
def test_ranks_that_see_one_gpu_of_several_are_warned_of_nvlink(
    seen: int, launcher: str, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outside.torch.cuda, "device_count", lambda: seen)
    for rank in (0, 1):
        outside._check_gpu(OutsideRanks(rank, 16, rank, launcher, "head", 29500, (8, 8)))  # type: ignore[arg-type]
    outside._check_gpu(OutsideRanks(0, 2, 0, launcher, "head", 29500, (1, 1)))  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("warning[one-gpu-seen]") == told


def test_ranks_that_join_twice_in_one_process_listen_in_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch makes the pipe where the variable says, and fails where that folder is gone."""
    for name in (records._PIPE, *records._PLACE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for run in ("first", "second"):
        with outside._listening("cuda") as private:
            records.write_to(tmp_path / run)
            assert os.environ[records._PIPE] == f"{private}/collectives."
            assert (
                records.place() == records.prefix(tmp_path / run) == str(tmp_path / run / "collectives_rank")
            )
    assert records.place() is None and records._PIPE not in os.environ
