"""Hydra's launcher for `hydra/launcher=submitit_slurm`; `parallelizer/training/job/slurm_jobs.py` implements
it.

Hydra instantiates launchers only from the package `hydra_plugins`, where a launcher would affect every Hydra
application on the machine. This launcher belongs only to the recipe's command, which registers it under a
name in that package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

PLACE = "hydra_plugins.parallelizer_slurm"

LAUNCHER: dict[str, Any] = {
    "_target_": f"{PLACE}.SlurmLauncher",
    "submitit_folder": "${hydra.sweep.dir}/.submitit/%j",
    "name": "${hydra.job.name}",
    # None: as few as hold the mesh's ranks, all with as many. Given one of the two, the other follows.
    "nodes": None,
    "tasks_per_node": None,  # None: at most as many as `hardware` has devices in a node; without one, all on one
    "gpus_per_node": None,  # None: one a task, where the device is known to be a GPU
    "cpus_per_task": None,
    "mem_gb": None,
    "timeout_min": 60,
    "partition": None,
    "qos": None,
    "account": None,
    "constraint": None,
    "exclude": None,
    "gres": None,
    "mem_per_cpu": None,
    "comment": None,
    "stderr_to_stdout": False,
    "signal_delay_s": 120,  # SIGUSR2 comes so many seconds before the time is over
    "max_num_timeout": 100,  # out of time, a run is requeued so often; preempted, as often as it happens
    "array_parallelism": 256,
    "additional_parameters": {},  # others of sbatch's
    "setup": None,  # commands in front of srun
    "srun_args": ["--wait=60"],  # once one task has ended, the others have a minute to end too
}
"""`hydra.launcher`; names are hydra-submitit-launcher's, and None leaves a thing to Slurm but where it says."""


class SlurmLauncher(Launcher):
    """Submits each job of a sweep to Slurm, with as many tasks as its mesh has ranks, and waits for all."""

    def __init__(self, **parameters: Any) -> None:
        self.parameters = parameters

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """What Hydra calls before `launch`."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """One result for each list of overrides, in their order."""
        from parallelizer.training.job.slurm_jobs import Sweep

        sweep = Sweep(self.parameters, self.hydra_context, self.task_function, self.config)
        return sweep.run(job_overrides, initial_job_idx)


def register() -> None:
    """Put it in the place of what hydra-submitit-launcher has under this name."""
    plugins = Plugins.instance()  # imports all plugins, theirs too: whoever stores last counts
    SlurmLauncher.__module__ = PLACE
    package, name = PLACE.split(".")
    try:
        parent = importlib.import_module(package)
    except ImportError:  # no plugin is installed
        parent = sys.modules[package] = ModuleType(package)
        parent.__path__ = []
    module = sys.modules[PLACE] = ModuleType(PLACE)
    setattr(module, SlurmLauncher.__name__, SlurmLauncher)
    setattr(parent, name, module)
    plugins.register(SlurmLauncher)
    ConfigStore.instance().store(
        group="hydra/launcher",
        name="submitit_slurm",
        node=LAUNCHER,
        package="hydra.launcher",
        provider="parallelizer",
    )
