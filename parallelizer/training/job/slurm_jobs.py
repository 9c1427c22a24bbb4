"""Jobs of a sweep as Slurm jobs, through submitit: one task for each rank of the job's own mesh.

hydra-submitit-launcher gives all jobs of a sweep the same tasks, but `-m parallel=tp2,tp8_cp2` has meshes of
two sizes. So this file submits the jobs, one array for each size, and each job runs as
hydra-submitit-launcher would run it.
"""

from __future__ import annotations

import atexit
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from parallelizer.configuration.compose import running_origins
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.launch import launcher as launch
from parallelizer.training.job import outcome

log = logging.getLogger(__name__)

MANY = {"-m", "--multirun", "hydra.mode=MULTIRUN"}
"""Words of a command that ask Hydra for a sweep."""

CHOSEN = "hydra/launcher=submitit_slurm"

AS_SUBMITIT = (
    *("name", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min"),
    "stderr_to_stdout",
)
"""Parameters that submitit has for every kind of cluster; it knows the others as `slurm_<name>`."""


def more_words(words: Sequence[str]) -> list[str]:
    """What a command needs that asks for Slurm without `-m`: Hydra leaves single runs to no launcher, so that one
    run is a sweep of one job.
    """
    return ["hydra.mode=MULTIRUN"] if CHOSEN in words and not MANY & set(words) else []


PERIOD = 2.0
"""Seconds between looks at Slurm's queue."""

SETTLING = 5.0
"""Seconds until a file that another node has written is seen here."""


@dataclass(frozen=True)
class Size:
    """What a job asks Slurm for; `gpus` of each node, None to say nothing of them."""

    nodes: int
    tasks: int
    gpus: int | None


def size_of(world: int, parameters: Mapping[str, Any], hardware: Mapping[str, Any], device: str) -> Size:
    """So few nodes as hold `world` ranks, all with as many. `device` is as configured: auto, cpu or cuda.

    Raises LaunchError for numbers of nodes and tasks that do not make `world`.
    """
    nodes, tasks = parameters.get("nodes"), parameters.get("tasks_per_node")
    most = int(hardware.get("devices_per_node") or 0) or world
    if nodes is None and tasks is None:
        tasks = max(n for n in range(1, min(most, world) + 1) if world % n == 0)
    nodes, tasks = nodes or world // (tasks or world), tasks or world // (nodes or 1)
    if nodes * tasks != world:
        raise launch.LaunchError(
            f"{nodes} nodes of {tasks} tasks are not the {world} ranks of the mesh",
            "leave hydra.launcher.nodes or hydra.launcher.tasks_per_node out, and it follows from the mesh",
        )
    gpus = parameters.get("gpus_per_node")
    if gpus is None and device != "cpu" and (device == "cuda" or hardware.get("devices_per_node")):
        gpus = tasks
    return Size(nodes, tasks, gpus)


class Task:
    """What every task of a job runs. Pickled when the job is submitted, and again when it is requeued."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, overrides: Sequence[str], *more: Any) -> JobReturn:
        """One rank's part: all run the same job of Hydra's, and rank 0 alone writes into its folder."""
        torch.set_num_threads(1)  # before the first operation: a job of one task forks ranks
        outside = launch.outside_ranks()
        if outside is not None and outside.rank > 0:
            overrides = [*overrides, "hydra.output_subdir=null", "hydra/job_logging=none"]
        try:
            result: JobReturn = self.run(overrides, *more)
        except SystemExit as end:  # it was asked to stop, and is in Slurm's queue again or will be
            if outside is None:
                raise
            launch.leave(outcome.status_of(end))
        if outside is not None:
            atexit.register(launch.leave)  # once submitit has written the result
        return result

    def checkpoint(self, *arguments: Any) -> Any:
        """What submitit runs when the job comes again: the same, whose run goes on from its newest checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, *arguments)


class Sweep:
    """One call of Hydra's launcher: `parameters` are `hydra.launcher`, the others what Hydra gives a launcher."""

    def __init__(
        self,
        parameters: Mapping[str, Any],
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
    ) -> None:
        self.parameters = {
            name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            for name, value in parameters.items()
        }
        self.context, self.function, self.config = hydra_context, task_function, config

    def run(self, jobs: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Submit the jobs, whose numbers count from `first`, and wait for them. Raises LaunchError, and JobFailed
        when a configuration is wrong, which it says, before anything is submitted.
        """
        try:
            import submitit
            from hydra_plugins.hydra_submitit_launcher.submitit_launcher import (
                SlurmLauncher as Stock,
            )
        except ImportError:
            raise launch.LaunchError(
                "hydra/launcher=submitit_slurm needs hydra-submitit-launcher, which is not installed",
                "pip install hydra-submitit-launcher submitit",
            ) from None
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        sizes = [self._size(overrides) for overrides in jobs]
        stock = Stock(**self.parameters)
        stock.setup(hydra_context=self.context, task_function=self.function, config=self.config)
        submitted: dict[int, Any] = {}
        for size in dict.fromkeys(sizes):
            numbers = [n for n, other in enumerate(sizes) if other == size]
            arguments = [
                (
                    list(jobs[n]),
                    "hydra.sweep.dir",
                    first + n,
                    f"job_id_for_{first + n}",
                    Singleton.get_state(),
                )
                for n in numbers
            ]
            try:
                found = self._executor(submitit, size).map_array(Task(stock), *zip(*arguments, strict=True))
            except (RuntimeError, ValueError, submitit.core.utils.FailedJobError) as error:
                raise launch.LaunchError(f"Slurm accepts no job: {_line(error)}") from None
            submitted |= dict(zip(numbers, found, strict=True))
        for n, overrides in enumerate(jobs):
            shown = " ".join(filter_overrides(overrides))
            print(f"job {submitted[n].job_id}: {_asked(sizes[n])}  {shown}", flush=True)
        try:
            return [self._result(submitted[n]) for n in range(len(jobs))]
        except KeyboardInterrupt:
            names = " ".join(job.job_id for job in submitted.values())
            print(
                f"\nSlurm keeps the jobs and will run them; to cancel them: scancel {names}", file=sys.stderr
            )
            raise

    def _size(self, overrides: Sequence[str]) -> Size:
        with self._configuration(overrides) as config:
            try:
                setup = from_config(config, running_origins())
                return size_of(setup.mesh.world_size, self.parameters, setup.hardware, setup.device_choice)
            except PlanError as error:
                show_diagnostics.write(error.diagnostics, sys.stderr)
                raise outcome.JobFailed from None

    @contextmanager
    def _configuration(self, overrides: Sequence[str]) -> Iterator[DictConfig]:
        """The configuration of one job, as Hydra's while it is looked at."""
        config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)
        try:
            yield OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        finally:
            HydraConfig.instance().cfg = before

    def _executor(self, submitit: Any, size: Size) -> Any:
        left = {name: value for name, value in self.parameters.items() if value not in (None, {})}
        folder, times = left.pop("submitit_folder"), left.pop("max_num_timeout", 0)
        executor = submitit.AutoExecutor(cluster="slurm", folder=folder, slurm_max_num_timeout=times)
        left |= {"nodes": size.nodes, "tasks_per_node": size.tasks}
        if size.gpus is not None:
            left["gpus_per_node"] = size.gpus
        executor.update_parameters(
            **{name if name in AS_SUBMITIT else f"slurm_{name}": value for name, value in left.items()}
        )
        return executor

    def _result(self, job: Any) -> JobReturn:
        """What Hydra's job returned in rank 0, or that it failed and where it is told why."""
        first = job.task(0)
        _wait(job.job_id, Path(first.paths.result_pickle))
        failed = JobReturn(status=JobStatus.FAILED)
        failed.return_value = outcome.JobFailed()
        try:
            result: JobReturn = first.result() if Path(first.paths.result_pickle).exists() else failed
        except Exception:  # whatever was raised there: its traceback is in the log
            result = failed
        if result.status == JobStatus.FAILED:
            print(f"job {job.job_id} failed: see {Path(first.paths.stderr).parent}/*.err", file=sys.stderr)
            return failed
        return result


def _wait(job: str, result: Path) -> None:
    """Until a job has left a result, or is not in Slurm's queue any more. (submitit asks `sacct`, which tells
    nothing where a cluster keeps no accounts.)
    """
    while not result.exists():
        queue = subprocess.run(
            ["squeue", "--me", "--noheader", "--array", "--format=%i"], capture_output=True, text=True
        )
        if queue.returncode == 0 and job not in queue.stdout.split():
            until = time.monotonic() + SETTLING
            while not result.exists() and time.monotonic() < until:
                time.sleep(0.5)
            return
        time.sleep(PERIOD)


def _asked(size: Size) -> str:
    """`16 tasks on 2 nodes, 8 GPUs each`."""
    tasks, gpus = size.nodes * size.tasks, size.gpus
    text = f"{tasks} task{'s' if tasks > 1 else ''} on {size.nodes} node{'s' if size.nodes > 1 else ''}"
    return text if not gpus else f"{text}, {gpus} GPU{'s' if gpus > 1 else ''} each"


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
