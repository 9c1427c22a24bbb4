"""What is here and what of it works: facts, and trials of what the commands and the recipe need.

Every trial runs in a child process that is given so many seconds, and nothing of it is left. Nothing is told that would
not be pasted into an issue: no host or user names, no values of environment variables but numbers; the home folder is `~`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parallelizer.child import Failed, NotInTime, in_time
from parallelizer.commands.import_torch import import_torch
from parallelizer.diagnostics.units import size

State = Literal["works", "broken", "absent"]

OLDEST, NEWEST = (2, 11), (2, 13)
"""The releases of torch that this package was tested with; see docs/stable.md."""

NEEDED = ("torch", "hydra-core", "omegaconf", "fnmatch2", "rich", "numpy")


@dataclass(frozen=True)
class Trial:
    """What was tried and how it went; `help` says what to do where it did not work. `needed`: nothing goes without it."""

    name: str
    state: State
    text: str
    help: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Report:
    """Facts by group and name, and trials."""

    facts: Mapping[str, Mapping[str, str]]
    trials: tuple[Trial, ...]

    @property
    def healthy(self) -> bool:
        """Whether everything that is needed works."""
        return not any(trial.needed and trial.state != "works" for trial in self.trials)


def examine() -> Report:
    """Look at everything. Takes some twenty seconds where all is well."""
    trials = tuple(_trials())
    facts = {
        "versions": dict(_versions()),
        "extras": dict(_extras()),
        "machine": dict(_machine()),
        "devices": dict(_devices()),
        "configuration": dict(_configuration()),
        "launchers": dict(_launchers()),
    }
    return Report(facts, trials)


# What is here


def version(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[tuple[str, str]]:
    yield "parallelizer", version("parallelizer") or "not installed"
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    for package in NEEDED:
        yield package, version(package) or "missing"


def extras() -> dict[str, list[str]]:
    """The optional extras of this package and what they ask for, as its metadata has them; without `dev` and `docs`."""
    asked: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("parallelizer") or ():
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
        if extra and extra[1] not in ("dev", "docs"):
            asked.setdefault(extra[1], []).append(re.split(r"[\s<>=!~;\[(]", line, maxsplit=1)[0])
    return asked


def _extras() -> Iterator[tuple[str, str]]:
    try:
        wanted = extras()
    except importlib.metadata.PackageNotFoundError:
        yield "none", "parallelizer is not installed, only on the path: pip install parallelizer"
        return
    for extra, packages in sorted(wanted.items()):
        found = [f"{name} {number}" for name in packages if (number := version(name))]
        missing = [name for name in packages if version(name) is None]
        here = ", ".join(found)
        lacks = f"without {', '.join(missing)}: pip install 'parallelizer[{extra}]'" if missing else ""
        yield extra, "; ".join(filter(None, (here, lacks)))


def _machine() -> Iterator[tuple[str, str]]:
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


def _devices() -> Iterator[tuple[str, str]]:
    try:
        yield from in_time(_seen_by_torch, 60).items()
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


def _configuration() -> Iterator[tuple[str, str]]:
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


def _launchers() -> Iterator[tuple[str, str]]:
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


# What works


def _trials() -> Iterator[Trial]:
    imported = attempt(
        "torch is imported", _imports_torch, 120, "install it again: pip install 'torch>=2.11'", needed=True
    )
    yield imported
    if imported.state != "works":
        return
    import_torch()  # here, so that the children need not
    yield attempt("a plan is read", _reads_a_plan, 30, "install again: pip install --force-reinstall parallelizer",
                  needed=True)  # fmt: skip
    yield attempt("a configuration is composed", _composes, 30, "pip install 'hydra-core>=1.3.2' 'omegaconf>=2.3'",
                  needed=True)  # fmt: skip
    yield attempt("a step is traced on a fake world", _traces, 90, "this torch is not one that was tested: 2.11 to 2.13",
                  needed=True)  # fmt: skip
    yield attempt(
        "two gloo ranks add up", _ranks_add_up, 60,
        "ranks on this machine must reach each other: try GLOO_SOCKET_IFNAME=lo", needed=True,
    )  # fmt: skip
    yield attempt(
        "context-parallel attention, SDPA", _attends, 60, "style context-parallel cannot be used here"
    )
    yield attempt("context-parallel attention, flex", _attends_flexibly, 60,
                  "let the model call scaled_dot_product_attention; flex_attention wants torch 2.12")  # fmt: skip
    if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")):
        yield Trial(
            "torch.compile", "absent", "no C++ compiler", "apt install g++; only style compile wants it"
        )
    else:
        yield attempt("torch.compile", _compiles, 180, "do without style compile, or mend the C++ compiler")
    yield _cuda()


def attempt(
    name: str, function: Callable[[], str], seconds: float, help: str, *, needed: bool = False
) -> Trial:
    """Try one thing in a child; `function` returns what to say of it when it works."""
    try:
        return Trial(name, "works", in_time(function, seconds), needed=needed)
    except (Failed, NotInTime) as error:
        return Trial(name, "broken", " ".join(str(error).split())[:200], help, needed)


def _imports_torch() -> str:
    import_torch()
    import torch

    torch.ones(2).sum()
    known = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if known < OLDEST:
        raise RuntimeError(
            f"torch {torch.__version__} is older than 2.11, the oldest that this package takes"
        )
    if known > NEWEST:
        return f"{torch.__version__}, newer than {'.'.join(map(str, NEWEST))}, the newest that was tested"
    return str(torch.__version__)


def _reads_a_plan() -> str:
    from parallelizer.language.load import load_plan

    return f"llama, {len(load_plan('llama').rules)} rules"


def _composes() -> str:
    from parallelizer.configuration.read_setup import from_overrides

    return f"parallel=fsdp2_tp2: {from_overrides(['parallel=fsdp2_tp2']).mesh}"


def _traces() -> str:
    from parallelizer.configuration.read_setup import from_overrides
    from parallelizer.configuration.validate import validate

    wrong = [d for d in validate(from_overrides(["parallel=cp2_tp2"])) if d.severity != "note"]
    if wrong:
        raise RuntimeError(wrong[0].message)
    return "llama on cp=2 x tp=2 is valid"


def _ranks_add_up() -> str:
    def worker() -> float:
        import torch
        import torch.distributed as dist

        one = torch.ones(1)
        dist.all_reduce(one)
        return float(one)

    if _on_two_ranks(worker) != [2.0, 2.0]:
        raise RuntimeError("the sum of 1 and 1 is not 2")
    return "forked, all-reduce"


def _attends() -> str:
    return _attention(flex=False)


def _attends_flexibly() -> str:
    return _attention(flex=True)


def _attention(*, flex: bool) -> str:
    def worker() -> float:
        import torch
        import torch.distributed as dist
        import torch.nn.functional as F
        from torch import Tensor, nn
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        from parallelizer.styles.context_parallel.public import context_parallel, shard_buffers

        class Attention(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                if not flex:
                    return F.scaled_dot_product_attention(x, x, x, is_causal=True)
                mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu")
                attended = flex_attention(x, x, x, block_mask=mask)
                return attended if isinstance(attended, Tensor) else attended[0]

        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("there is no world")
        whole = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        expected = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
        module = Attention()
        context_parallel(module, group, method="all-gather")
        rows = {"x": whole, "y": expected}
        local = shard_buffers(rows, {"x": 2, "y": 2}, group)
        found = module(local["x"])
        found.sum().backward()
        return float((found - local["y"]).detach().abs().max())

    worst = max(_on_two_ranks(worker))
    if worst > 1e-5:
        raise RuntimeError(f"the result is {worst:.1g} off")
    return "exact on two ranks, forward and backward"


def _on_two_ranks(worker: Callable[[], float]) -> list[float]:
    import torch

    from parallelizer.runtime.launch import launcher as launch

    torch.set_num_threads(1)
    return launch.start(worker, (), ranks=2, device="cpu", start_timeout=40, collective_timeout=20)


def _compiles() -> str:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_COMPILE_THREADS="1")
        torch.set_num_threads(1)

        @torch.compile
        def twice(x: Any) -> Any:
            return x.sin() * 2

        if not torch.allclose(twice(torch.ones(8)), torch.ones(8).sin() * 2):
            raise RuntimeError("compiled, it computes something else")
    return "a function for the CPU"


def _cuda() -> Trial:
    name = "CUDA and NCCL"
    try:
        devices = in_time(_cuda_devices, 60)
    except (Failed, NotInTime) as error:
        return Trial(name, "broken", str(error), "do without: device=cpu")
    if not devices:
        return Trial(name, "absent", "no GPU that torch sees", "ranks run on CPUs: device=cpu")
    return attempt(name, _nccl, 120, "see that driver and torch's CUDA fit: nvidia-smi; or device=cpu")


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _nccl() -> str:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    if float(one) != 1.0:
        raise RuntimeError("an all-reduce of one rank changes its value")
    return f"an all-reduce on cuda:0 of {torch.cuda.device_count()}"


# As a command


def document(report: Report) -> dict[str, Any]:
    """The JSON of `doctor --json`."""
    return {
        "healthy": report.healthy,
        **{group: dict(facts) for group, facts in report.facts.items()},
        "trials": [
            {"name": t.name, "state": t.state, "text": t.text, "help": t.help or None, "needed": t.needed}
            for t in report.trials
        ],
    }


def text(report: Report) -> str:
    """The report as people paste it into an issue: one line each."""
    rows = [(group, name, value) for group, facts in report.facts.items() for name, value in facts.items()]
    width = max(len(name) for name in (*(r[1] for r in rows), *(t.name for t in report.trials)))
    lines: list[str] = []
    for at, (group, name, value) in enumerate(rows):
        if at == 0 or rows[at - 1][0] != group:
            lines += ["", group] if lines else [group]
        lines.append(f"  {name:{width}}  {value}")
    lines += ["", "what works here"]
    for trial in report.trials:
        lines.append(f"  {trial.name:{width}}  {trial.state}: {trial.text}")
        if trial.help:
            lines.append(f"  {'':{width}}  {trial.help}")
    broken = [trial.name for trial in report.trials if trial.needed and trial.state != "works"]
    lines += ["", f"needed and broken: {', '.join(broken)}" if broken else "all that is needed works"]
    return "\n".join(lines) + "\n"


def run(as_json: bool) -> int:
    """Print the report. Returns 0, or 1 where something that is needed does not work."""
    import json

    report = examine()
    if as_json:
        json.dump(document(report), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(text(report))
    return 0 if report.healthy else 1
