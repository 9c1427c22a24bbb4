"""What is here: versions, the machine, its devices, configurations and launchers.

Nothing is told that would not be pasted into an issue: no host or user names, no values of environment variables but
numbers; the home folder is `~`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from parallelizer.child.in_time import Failed, NotInTime, in_time
from parallelizer.diagnostics.units import size

DISTRIBUTION = "torch-parallelizer"
"""What pip calls this package."""

NEEDED = ("torch", "hydra-core", "omegaconf", "fnmatch2", "rich", "numpy")
"""The distributions without which nothing goes."""


def version(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> Iterator[tuple[str, str]]:
    """This package, Python, and what it needs."""
    yield "parallelizer", version(DISTRIBUTION) or "not installed"
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    for package in NEEDED:
        yield package, version(package) or "missing"


def packages_by_extra() -> dict[str, list[str]]:
    """The optional extras of this package and what they ask for, as its metadata has them; without `dev` and `docs`."""
    asked: dict[str, list[str]] = {}
    for line in importlib.metadata.requires(DISTRIBUTION) or ():
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
        if extra and extra[1] not in ("dev", "docs"):
            asked.setdefault(extra[1], []).append(re.split(r"[\s<>=!~;\[(]", line, maxsplit=1)[0])
    return asked


def extras() -> Iterator[tuple[str, str]]:
    """What is installed of each optional extra, and how to install the rest."""
    try:
        wanted = packages_by_extra()
    except importlib.metadata.PackageNotFoundError:
        yield "none", "parallelizer is not installed, only on the path: pip install path/to/its/clone"
        return
    for extra, packages in sorted(wanted.items()):
        found = [f"{name} {number}" for name in packages if (number := version(name))]
        missing = [name for name in packages if version(name) is None]
        here = ", ".join(found)
        lacks = f"without {', '.join(missing)}: pip install {' '.join(missing)}" if missing else ""
        yield extra, "; ".join(filter(None, (here, lacks)))


def machine() -> Iterator[tuple[str, str]]:
    """The system, processors and memory."""
    release = re.match(r"[\d.]+", platform.release())  # what follows may name a cluster
    yield "system", f"{platform.system()} {release[0] if release else ''} {platform.machine()}".strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "processors", f"{cores} to use of {os.cpu_count()}"
    yield "memory", _memory()
    yield "shared memory", _free("/dev/shm") if Path("/dev/shm").exists() else "no /dev/shm"
    if threads := os.environ.get("OMP_NUM_THREADS"):
        yield "OMP_NUM_THREADS", threads if threads.isdecimal() else "not a number"


def _memory() -> str:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        allowed = int(limit.read_text())
    except (OSError, ValueError):
        return size(total)
    return f"{size(allowed)} to use of {size(total)}" if allowed < total else size(total)


def _free(path: str) -> str:
    return f"{size(shutil.disk_usage(path).free)} free"


def devices() -> Iterator[tuple[str, str]]:
    """What torch was built for and which devices it sees, asked in a child."""
    try:
        yield from in_time(_seen_by_torch, 60, sees_gpus=True).items()
    except (Failed, NotInTime) as error:
        yield "torch", f"cannot be asked: {error}"


def _seen_by_torch() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    seen = {"built for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"}
    if torch.version.hip:
        seen["built for"] = f"ROCm {torch.version.hip}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            seen[f"cuda:{index}"] = f"{properties.name}, {size(properties.total_memory)}"
    else:
        seen["cuda"] = "none"
    if torch.backends.mps.is_available():
        seen["mps"] = "there, and not used: ranks run on CPU"
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    seen["backends"] = ", ".join(backends) or "none"
    return seen


def configuration() -> Iterator[tuple[str, str]]:
    """The shipped configuration, and folders beside it in the working directory."""
    from parallelizer.diagnostics.package_folder import config_folder

    yield "shipped", _contents(Path(config_folder()))
    here = Path.cwd()
    own = [f for f in (here, *sorted(here.iterdir())) if (f / "plans").is_dir() or (f / "parallel").is_dir()]
    for folder in own:
        if folder.resolve() != Path(config_folder()).resolve() and [*folder.glob("p*/*.yaml")]:
            yield f"--config-dir {folder.name if folder != here else '.'}", _contents(folder)


def _contents(folder: Path) -> str:
    counts = ((kind, len(list((folder / kind).glob("*.yaml")))) for kind in ("plans", "parallel", "model"))
    names = {"plans": "plans", "parallel": "presets", "model": "models"}
    return f"{tilde(folder)}: {', '.join(f'{count} {names[kind]}' for kind, count in counts)}"


def tilde(path: Path) -> str:
    """A path with the home folder as `~`."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if home != Path("/") and path.is_relative_to(home) else str(path)


def launchers() -> Iterator[tuple[str, str]]:
    """Launchers on the path, and the one that this process runs under."""
    found = [name for name in ("torchrun", "srun", "sbatch", "mpirun") if shutil.which(name)]
    yield "commands", ", ".join(found) or "none on the path; the recipe starts its ranks itself"
    environment = os.environ
    if environment.get("WORLD_SIZE", "").isdecimal():
        yield "torchrun", f"has started this process as one of {environment['WORLD_SIZE']} ranks"
    if environment.get("SLURM_JOB_ID"):
        tasks = environment.get("SLURM_NTASKS", "")
        yield "Slurm", f"inside a job of {tasks if tasks.isdecimal() else 'unknown'} tasks"
    others = sorted(name for name in environment if name.startswith(("NCCL_", "GLOO_", "TORCH_")))
    if others:
        yield "variables set", ", ".join(others)


GROUPS = {
    "versions": versions,
    "extras": extras,
    "machine": machine,
    "devices": devices,
    "configuration": configuration,
    "launchers": launchers,
}
"""The groups in the order in which they are printed."""
