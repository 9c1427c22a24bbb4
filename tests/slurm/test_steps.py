"""What a real Slurm tells its tasks, and that our reading of it is right: ranks, sizes, places to meet."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from parallelizer.runtime.launch import slurm_step
from parallelizer.runtime.launch.outside import OutsideRanks, outside_ranks
from tests.slurm.cluster import Slurm

pytestmark = pytest.mark.ranks

TELL = """
import json, os, sys, uuid
kept = {n: v for n, v in os.environ.items() if n.startswith("SLURM") or n == "ENVIRONMENT"}
with open(os.path.join(sys.argv[1], uuid.uuid4().hex), "w") as file:
    json.dump(kept, file)
"""
"""Tasks only tell their environments, which are read here: so they need not import torch."""


@dataclass(frozen=True)
class Task:
    environment: dict[str, str]
    found: OutsideRanks | None
    name: str | None


class Told:
    """`command` is what tasks run to tell their environments; `tasks` reads them as their own tasks would."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder / "told", patch
        self.folder.mkdir()
        (folder / "tell.py").write_text(TELL)
        self.command = ("python", str(folder / "tell.py"), str(self.folder))

    def tasks(self) -> list[Task]:
        """In order of rank."""
        read = [self._task(json.loads(path.read_text())) for path in self.folder.iterdir()]
        return sorted(read, key=lambda task: task.found.rank if task.found else 0)

    def _task(self, environment: dict[str, str]) -> Task:
        with self.patch.context() as patch:
            for name in os.environ:
                if name.startswith("SLURM") or name in ("ENVIRONMENT", "RANK", "MASTER_ADDR", "MASTER_PORT"):
                    patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setenv("PATH", self.path)
            return Task(environment, outside_ranks(), slurm_step.stable_name())

    path = os.environ["PATH"]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(tmp_path, monkeypatch)


def batch(slurm: Slurm, folder: Path, script: str, *options: str) -> str:
    """The output of a batch job that has ended well."""
    path, out = folder / "job.sh", folder / "job.out"
    path.write_text("#!/bin/bash\nset -e\n" + textwrap.dedent(script))
    slurm.wait(slurm.submit(path, f"--output={out}", *options, cwd=folder), timeout=30)
    return out.read_text()


def test_tasks_of_srun_on_one_node(slurm: Slurm, told: Told) -> None:
    slurm.run("srun", "-N1", "-n2", *told.command)
    tasks = told.tasks()
    assert [t.found for t in tasks] == [
        OutsideRanks(rank, 2, rank, "slurm", "127.0.0.1", tasks[0].found.port, (2,)) for rank in (0, 1)
    ]
    assert [t.name for t in tasks] == [None, None]  # nobody requeues what srun alone has started


@pytest.mark.parametrize("distribution", ["block", "cyclic", "plane=1"])
def test_ranks_are_counted_node_by_node(distribution: str, slurm: Slurm, told: Told) -> None:
    slurm.run("srun", "-N2", "-n4", "--ntasks-per-node=2", f"--distribution={distribution}", *told.command)
    tasks = told.tasks()
    assert [t.found.rank for t in tasks] == [0, 1, 2, 3]
    assert [t.environment["SLURM_NODEID"] for t in tasks] == ["0", "0", "1", "1"]
    assert [t.found.local_rank for t in tasks] == [0, 1, 0, 1]
    assert {t.found.nodes for t in tasks} == {(2, 2)}
    given = [t.environment["SLURM_PROCID"] for t in tasks]
    assert given == (["0", "1", "2", "3"] if distribution == "block" else ["0", "2", "1", "3"])


def test_nodes_with_unlike_numbers_of_tasks(slurm: Slurm, told: Told) -> None:
    slurm.run("srun", "-N2", "-n3", "--distribution=cyclic", *told.command)
    tasks = told.tasks()
    assert [t.found.rank for t in tasks] == [0, 1, 2]
    assert [t.found.nodes for t in tasks] == [(2, 1)] * 3
    assert [t.environment["SLURM_NODEID"] for t in tasks] == ["0", "0", "1"]


def test_a_nodes_name_that_is_no_hosts_is_looked_up_in_slurm(slurm: Slurm, told: Told) -> None:
    slurm.run("srun", "-N2", "-n2", *told.command)
    tasks = told.tasks()
    assert tasks[0].environment["SLURM_STEP_NODELIST"] == "na,nb"
    assert [t.found.address for t in tasks] == ["127.0.0.1"] * 2


def test_steps_of_a_batch_job(slurm: Slurm, told: Told, tmp_path: Path) -> None:
    """The script itself, a step smaller than the allocation, one task alone, and two steps side by side."""
    tell = " ".join(told.command)
    batch(
        slurm,
        tmp_path,
        f"""
        {tell}
        srun -n 2 {tell}
        srun -n 1 -N 1 {tell}
        for i in 1 2; do srun -N 1 -n 2 --exact --mem=0 sh -c "{tell}; sleep 0.5" & done
        wait
        """,
        "-n4",
        "-N1",
    )
    tasks = told.tasks()
    by_step: dict[str, list[Task]] = {}
    for task in tasks:
        by_step.setdefault(task.environment.get("SLURM_STEP_ID", "script"), []).append(task)
    sizes = {step: [t.found and t.found.world_size for t in of] for step, of in by_step.items()}
    assert sizes == {"script": [None], "0": [2, 2], "1": [None], "2": [2, 2], "3": [2, 2]}
    ports = [{t.found.port for t in by_step[step] if t.found} for step in ("0", "2", "3")]
    assert all(len(of_step) == 1 for of_step in ports)
    assert len(set.union(*ports)) == 3
    job = tasks[0].environment["SLURM_JOB_ID"]
    assert {step: of[0].name for step, of in by_step.items()} == {
        "script": f"slurm-{job}",
        **{step: f"slurm-{job}.{step}" for step in "0123"},
    }


def test_a_requeued_job_keeps_its_names(slurm: Slurm, told: Told, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(
        f'#!/bin/bash\nsrun -n 1 {" ".join(told.command)}\n[ -n "$SLURM_RESTART_COUNT" ] || exit 75\n'
    )
    job = slurm.submit(path, f"--output={tmp_path}/out", "--array=7", cwd=tmp_path)
    slurm.requeued(f"{job}_7")
    slurm.wait(f"{job}_7", timeout=180)
    first, second = sorted(told.tasks(), key=lambda task: "SLURM_RESTART_COUNT" in task.environment)
    assert first.name == second.name == f"slurm-{job}_7.0"
    assert "SLURM_RESTART_COUNT" not in first.environment
    assert second.environment["SLURM_RESTART_COUNT"] == "1"
