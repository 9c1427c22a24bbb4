"""Train a model under a plan: `python -m recipes.train parallel=tp8_cp2`.

The configuration is composed once, here in the parent, where everything that can be wrong is looked for. Then
the ranks are started (or joined, under torchrun and Slurm), and each runs `train`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import parallelizer as pz
from parallelizer import launch
from parallelizer.compose import OverrideSyntaxError, compose_config, running_origins
from parallelizer.config import config_folder
from parallelizer.diagnostics import Diagnostic, PlanError, Span
from parallelizer.show import diagnostics as show_diagnostics
from parallelizer.show import plan as show_plan
from parallelizer.show import step as show_step
from parallelizer.simulate.trace import trace
from recipes.data import Data, build_data
from recipes.data.loader import check_fits, evaluation_batches, global_batch
from recipes.metrics import MetricsWriter
from recipes.optim import learning_rate
from recipes.progress import Progress, summary


@dataclass(frozen=True)
class Job:
    """Everything a rank needs, composed and checked in the parent."""

    setup: pz.Setup
    program: pz.Program
    data: Data
    train: dict[str, Any]
    optim: dict[str, Any]
    folder: Path | None


@dataclass(frozen=True)
class Result:
    """What a run comes to: the loss of each step and the held-out one, in nats a token."""

    losses: tuple[float, ...]
    validation_loss: float
    unigram_entropy: float
    seconds: float


def train(job: Job) -> Result:
    """One rank's run, in an initialised world."""
    setup, settings = job.setup, job.train
    torch.manual_seed(settings["seed"])
    # The logits leave as a view of a DTensor's local tensor; nothing here changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = pz.build_mesh(setup.mesh, setup.device)
    model = pz.apply(job.program, setup.build_model(), mesh)
    pz.materialize(model, device=_device(setup.device), seed=settings["seed"])
    optimizer = setup.build_optimizer(model)
    loss = setup.loss()
    batches = Batches(job, mesh)

    started = time.monotonic()
    losses = []
    with Progress.on_rank_0(settings, job.data, job.folder) as progress, _metrics(job.folder) as metrics:
        for step in range(settings["steps"]):
            begun = time.monotonic()
            rate = learning_rate(
                step,
                peak=job.optim["lr"],
                warmup=job.optim["warmup"],
                total=settings["steps"],
                final_ratio=job.optim["final_ratio"],
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            done = pz.train_step(model, batches.training(step), loss, optimizer, settings["clip"])
            measured = {
                "step": step + 1,
                "loss": done.loss.item(),
                "grad_norm": done.grad_norm.item(),
                "lr": rate,
                "tokens_per_second": setup.workload.batch_size
                * setup.workload.seq_len
                / (time.monotonic() - begun),
            }
            losses.append(measured["loss"])
            last = step + 1 == settings["steps"]
            if last or (settings["eval_every"] and (step + 1) % settings["eval_every"] == 0):
                measured["validation_loss"] = pz.evaluate(model, batches.validation(), loss).item()
            if metrics:
                metrics.write(**measured)
            progress.step(measured)
    pz.restore_buffers(model)
    return Result(
        tuple(losses), measured["validation_loss"], job.data.unigram_entropy, time.monotonic() - started
    )


class Batches:
    """This rank's part of each global batch, which depends on seed and step only."""

    def __init__(self, job: Job, mesh: Any) -> None:
        self.job, self.mesh, self.plan = job, mesh, job.program.plan
        self.index, self.ranks = pz.batch_rank(mesh)
        self.device = _device(job.setup.device)

    def training(self, step: int) -> list[dict[str, torch.Tensor]]:
        """The parts that gradients are accumulated over."""
        work, accumulate = self.job.setup.workload, self.job.setup.workload.accumulate
        rows = work.batch_size // accumulate // self.ranks
        parts = []
        for part in range(accumulate):
            first = part * rows * self.ranks + self.index * rows
            batch = global_batch(
                self.job.data.train,
                step=step,
                batch_size=work.batch_size,
                seq_len=work.seq_len,
                seed=self.job.train["seed"],
                rows=slice(first, first + rows),
            )
            parts.append(self._local(batch))
        return parts

    def validation(self) -> list[dict[str, torch.Tensor]]:
        """The same held-out tokens every time."""
        work = self.job.setup.workload
        rows = work.batch_size // self.ranks
        batches = evaluation_batches(
            self.job.data.heldout,
            batch_size=work.batch_size,
            seq_len=work.seq_len,
            count=self.job.train["eval_batches"],
            rows=slice(self.index * rows, (self.index + 1) * rows),
        )
        return [self._local(b) for b in batches]

    def _local(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {k: v.to(self.device) for k, v in pz.shard_batch(batch, self.plan, self.mesh).items()}


def prepare(config: DictConfig, folder: Path | None) -> Job:
    """Check everything that can be checked before a rank starts. Raises PlanError."""
    setup = pz.from_config(config, running_origins())
    program = setup.compile(setup.build_model())
    setup.loss()
    settings = OmegaConf.to_container(config.train, resolve=True)
    optim = OmegaConf.to_container(config.optim, resolve=True)
    if not isinstance(settings["steps"], int) or settings["steps"] < 1:  # type: ignore[call-overload,index]
        raise PlanError(
            [
                Diagnostic(
                    "wrong-type",
                    f"train.steps is {settings['steps']!r}",  # type: ignore[call-overload,index]
                    setup.origins.span("train.steps"),
                    "a whole number from 1",
                )
            ]
        )
    setup.build_optimizer(torch.nn.Linear(1, 1))
    data = Data(torch.empty(0), torch.empty(0), 0, 0.0) if config.dry_run else _data(config, setup)
    return Job(setup, program, data, settings, optim, folder)  # type: ignore[arg-type]


def _data(config: DictConfig, setup: pz.Setup) -> Data:
    data = build_data(config.data)
    check_fits(data, setup.workload.seq_len)
    return data


def run(config: DictConfig) -> None:
    """The task that Hydra runs, once for each job of a sweep."""
    outside = launch.outside_ranks()
    folder = Path(HydraConfig.get().runtime.output_dir)
    leads = outside is None or outside.rank == 0
    try:
        job = prepare(config, folder if leads else None)
        world = job.setup.mesh.world_size
        if outside is not None and outside.world_size != world and not config.dry_run:
            raise PlanError([_world_size(job.setup, outside)])
        if leads:
            show_diagnostics.write(job.program.diagnostics, sys.stderr)
            show_plan.write(job.program, job.setup.build_model(), sys.stdout)
            sys.stdout.flush()
        if config.dry_run:
            if leads:
                _dry_run(job)
            _discard(folder)
            return
        limits = config.launch
        if outside is not None:
            result = launch.join(
                _joined, (job,), device=job.setup.device, collective_timeout=limits.collective_timeout
            )
        else:
            launch.check_ranks(
                world,
                job.setup.device,
                max_cpu_ranks=limits.max_cpu_ranks,
                command=shlex.join(["-m", "recipes.train", *sys.argv[1:]]),
            )
            result = launch.start(
                train,
                (job,),
                ranks=world,
                device=job.setup.device,
                log_dir=folder,
                start_timeout=limits.start_timeout,
                collective_timeout=limits.collective_timeout,
            )[0]
        if leads:
            summary(result, folder)
    except PlanError as error:
        if leads:
            show_diagnostics.write(error.diagnostics, sys.stderr)
        _discard(folder)
        sys.exit(1)
    except launch.LaunchError as error:
        if leads:
            print(
                f"error: {error.message}",
                *([f"  = help: {error.help}"] if error.help else []),
                sep="\n",
                file=sys.stderr,
            )
        if not (folder / "metrics.jsonl").exists():
            _discard(folder)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _dry_run(job: Job) -> None:
    """What one step sends and holds, as rank 0 sees it."""
    setup = job.setup
    step = trace(job.program, setup.build_model(), setup.recipe())
    show_step.write(step, sys.stdout, device=setup.device, hardware=setup.hardware)


def _joined(job: Job) -> Result:
    """As one of ranks that others started: rank 0 has chosen the output folder, the others learn of it."""
    chosen = [str(job.folder)]
    dist.broadcast_object_list(chosen, src=0)
    return train(job)


def _world_size(setup: pz.Setup, outside: launch.OutsideRanks) -> Diagnostic:
    world = setup.mesh.world_size
    return Diagnostic(
        "world-size",
        f"the mesh has {world} ranks ({setup.mesh}), {outside.launcher} started {outside.world_size}",
        setup.origins.span("parallel.mesh") or Span("<configuration>"),
        f"start {world} ranks, or choose a mesh of {outside.world_size}",
    )


def _discard(folder: Path) -> None:
    """Remove an output folder in which nothing was trained, and the day's folder when nothing else is in
    it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for parent in folder.parents[:2]:
        try:
            parent.rmdir()
        except OSError:
            break


def _device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _metrics(folder: Path | None) -> Any:
    from contextlib import nullcontext

    return (
        MetricsWriter(folder / "metrics.jsonl")
        if folder is not None and dist.get_rank() == 0
        else nullcontext()
    )


def _explain_composition(arguments: list[str]) -> None:
    """Compose once before Hydra does, so that what is misspelt is shown at its place and not by Hydra.
    Whoever uses Hydra's own flags, a sweep among them, gets Hydra's words.
    """
    if any(a.startswith("-") for a in arguments):
        return
    try:
        compose_config(arguments)
    except PlanError as error:
        show_diagnostics.write(error.diagnostics, sys.stderr)
        sys.exit(1)
    except OverrideSyntaxError as error:
        show_diagnostics.write([error.diagnostic], sys.stderr)
        sys.exit(2)


def main() -> None:
    """The entry point: Hydra's command line, for one process of a job."""
    # Ranks are forked from this process: an OpenMP region here would hang children that use two threads.
    torch.set_num_threads(1)
    task = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="train")(run)
    outside = launch.outside_ranks()
    if outside is None or outside.rank == 0:
        _explain_composition(sys.argv[1:])
        task()
        return
    # Only rank 0 makes an output folder: the others compose the same configuration into one that is thrown
    # away.
    with tempfile.TemporaryDirectory() as scratch:
        sys.argv += [
            f"hydra.run.dir={scratch}",
            "hydra.output_subdir=null",
            "hydra/job_logging=none",
            "hydra/hydra_logging=none",
        ]
        os.environ.setdefault("HYDRA_FULL_ERROR", "0")
        task()


if __name__ == "__main__":
    main()
