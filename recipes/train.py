"""Train a model under a plan: `python -m recipes.train parallel=tp8_cp2`.

The configuration is composed once, here in the parent, where everything that can be wrong is looked for. Then
the ranks are started (or joined, under torchrun and Slurm), and each runs `train`.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # `python recipes/train.py`, which is what Hydra's shell completion calls
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from parallelizer import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # what follows takes a second or two, and outcome.py is not there yet

import logging
import shlex
import tempfile
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import parallelizer as pz
from parallelizer import launch
from parallelizer.checks.layout_flow import check_layout_flow
from parallelizer.compose import running_origins
from parallelizer.config import config_folder
from parallelizer.diagnostics import Diagnostic, PlanError, Span, has_errors
from parallelizer.hugging_face.source import weights_folder
from parallelizer.origins import Origins
from parallelizer.show import diagnostics as show_diagnostics
from parallelizer.show import dry_run
from parallelizer.show import plan as show_plan
from recipes import outcome
from recipes.batches import Batches, local_device
from recipes.checkpoint import Keeper, check_start, place_of, record_of
from recipes.data import Data, Source, build_data
from recipes.data.entries import check_entries
from recipes.data.position import Position, position_of
from recipes.metrics import MetricsWriter
from recipes.optim import learning_rate
from recipes.progress import Progress, summary
from recipes.result import Result
from recipes.settings import Settings, read_settings


@dataclass(frozen=True)
class Job:
    """Everything a rank needs, composed and checked in the parent. Rank 0 writes into `folder`; `weights` are
    pretrained ones to start from, `record` is what checkpoints tell of the run, `position` where it begins in its data.
    """

    setup: pz.Setup
    program: pz.Program
    settings: Settings
    data: Source
    folder: Path | None
    weights: Path | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    position: Position = Position(0, 0, 0, "")


def train(job: Job) -> Result:
    """One rank's run, in an initialised world."""
    setup, settings = job.setup, job.settings
    # The logits leave as a view of a DTensor's local tensor; nothing here changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = pz.build_mesh(setup.mesh, setup.device)
    pz.seed_ranks(mesh, settings.seed)
    device = local_device(setup.device)
    model = pz.apply(job.program, setup.build_model(), mesh)
    leads = dist.get_rank() == 0
    place = place_of(settings, job.folder or Path())
    keeper = Keeper(place, settings, job.record, job.position, mesh, leads=leads)
    begun_from = keeper.find()
    if begun_from is not None:
        pz.materialize(model, device=device, seed=settings.seed, skip_saved=True)
    elif job.weights is not None:
        pz.load_pretrained(model, job.weights, device=device)
    else:
        pz.materialize(model, device=device, seed=settings.seed)
    optimizer, loss = setup.build_optimizer(model), setup.loss()
    first, samples = keeper.load(begun_from, model, optimizer) if begun_from is not None else (0, 0)
    batches = Batches(job.data, job.program.plan, setup.workload, settings, mesh, device)
    units = setup.workload.batch_size * job.data.units(setup.workload.seq_len)

    started = time.monotonic()
    losses: list[float] = []
    validation = None
    with (
        Progress(settings, quiet=not leads, unit=job.data.unit, done=first) as progress,
        _metrics(job.folder, leads, first if keeper.goes_on else None) as metrics,
    ):
        for step in range(first, settings.steps):
            begun = time.monotonic()
            rate = _set_learning_rate(optimizer, settings, step)
            done = pz.train_step(model, batches.training(samples), loss, optimizer, setup.clip)
            samples += setup.workload.batch_size
            measured = {
                "step": step + 1,
                "loss": done.loss.item(),
                "grad_norm": done.grad_norm.item(),
                "lr": rate,
                "tokens_per_second": units / (time.monotonic() - begun),
            }
            losses.append(measured["loss"])
            last = step + 1 == settings.steps
            if last or (settings.eval_every and (step + 1) % settings.eval_every == 0):
                validation = pz.evaluate(model, batches.validation(), loss).item()
                measured["validation_loss"] = validation
            if metrics:
                metrics.write(**measured)
            progress.step(measured)
            if keeper.is_due(step + 1):
                keeper.save(step + 1, samples, model, optimizer)
            keeper.report()
        keeper.close()
    pz.restore_buffers(model)
    if validation is None:
        validation = pz.evaluate(model, batches.validation(), loss).item()
    seconds = time.monotonic() - started
    if settings.save is not None:
        pz.save_pretrained(model, settings.save)
    return Result(tuple(losses), validation, job.data.baseline, seconds, first)


def _set_learning_rate(optimizer: torch.optim.Optimizer, settings: Settings, step: int) -> float:
    rate = learning_rate(
        step, peak=settings.lr, warmup=settings.warmup, total=settings.steps, final_ratio=settings.final_ratio
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def prepare(config: DictConfig, origins: Origins, folder: Path | None) -> Job:
    """Check everything that can be checked before a rank starts. Raises PlanError.

    The data of a dry run is empty.
    """
    setup = pz.from_config(config, origins)
    settings = read_settings(config, origins)
    model = setup.build_model()
    program = setup.compile(model)
    weights = _weights(setup, settings, model)
    setup.loss()
    setup.build_optimizer(torch.nn.Linear(1, 1))
    if config.dry_run:
        return Job(setup, program, settings, Data(torch.empty(0), torch.empty(0), 0, 0.0), folder)
    data = build_data(config.data)
    data.check_fits(setup.workload.seq_len)
    check_entries(data, setup, settings.seed)
    options: Any = OmegaConf.to_container(config.data, resolve=True)
    position = position_of(data, 0, seed=settings.seed, seq_len=setup.workload.seq_len, options=options)
    if folder is not None:
        found = check_start(place_of(settings, folder), settings, setup, model, position)
        if found:
            raise PlanError(found)
    return Job(setup, program, settings, data, folder, weights, record_of(config, setup), position)


def _weights(setup: pz.Setup, settings: Settings, model: torch.nn.Module) -> Path | None:
    """The folder of pretrained weights, if there is one, whose files fit the model as far as their headers tell; and
    whether the trained model can be saved where it should be. Raises PlanError.
    """
    weights = weights_folder(setup.model, setup.origins) if settings.pretrained else None
    if weights is None and settings.save is None:
        return None
    from parallelizer.hugging_face.saving import check_savable
    from parallelizer.hugging_face.weights import look_up

    found = None if weights is None else look_up(model, weights)
    if settings.save is not None:
        check_savable(model, settings.save, found)
    return weights


def run(config: DictConfig, folder: Path | None, outside: launch.OutsideRanks | None) -> None:
    """One job: check it, show its plan, train, and say how it went. Raises PlanError and LaunchError."""
    leads = folder is not None
    job = prepare(config, running_origins(), folder)
    mesh, device, settings = job.setup.mesh, job.setup.device, job.settings
    if config.dry_run:
        if folder is not None:
            outcome.discard(folder)
            _dry_run(job)
        return
    _check_world(job.setup, settings, outside)
    if leads:
        found = (*job.program.diagnostics, *_followed(job))
        if has_errors(found):
            raise PlanError(found)
        show_diagnostics.write(found, sys.stderr)
        show_plan.write(job.program, job.setup.build_model(), sys.stdout)
        sys.stdout.flush()
    if outside is not None:
        result = launch.join(_joined, (job,), device=device, collective_timeout=settings.collective_timeout)
    else:
        result = launch.start(
            train,
            (job,),
            ranks=mesh.world_size,
            device=device,
            log_dir=folder,
            start_timeout=settings.start_timeout,
            collective_timeout=settings.collective_timeout,
        )[0]
    if folder is not None:
        outcome.tidy(folder)
        summary(result, folder)
        if settings.save is not None:
            print(f"model saved in {settings.save}")


def _followed(job: Job) -> tuple[Diagnostic, ...]:
    """What one step on a fake world tells that no file can: see `parallelizer validate`."""
    return check_layout_flow(job.setup, job.program, job.setup.build_model())


def _dry_run(job: Job) -> None:
    """What `parallelizer plan` prints. Raises PlanError when the step cannot run."""
    setup, program, model = job.setup, job.program, job.setup.build_model()
    step, found = dry_run.trace_step(setup, program, model)
    if has_errors(found):
        raise PlanError(found)
    dry_run.write(setup, program, model, step, found)


def _joined(job: Job) -> Result:
    """As one of ranks that others started: rank 0 has chosen the output folder, the others learn of it."""
    chosen = [str(job.folder)]
    dist.broadcast_object_list(chosen, src=0)
    return train(replace(job, folder=Path(chosen[0])))


def _check_world(setup: pz.Setup, settings: Settings, outside: launch.OutsideRanks | None) -> None:
    """Whether there are, or can be had, as many ranks as the mesh wants."""
    world = setup.mesh.world_size
    if outside is None:
        command = shlex.join(["-m", "recipes.train", *sys.argv[1:]])
        launch.check_ranks(world, setup.device, max_cpu_ranks=settings.max_cpu_ranks, command=command)
        return
    if outside.world_size != world:
        message = (
            f"the mesh has {world} ranks ({setup.mesh}), {outside.launcher} started {outside.world_size}"
        )
        span = setup.origins.span("parallel.mesh") or Span("<configuration>")
        help = f"start {world} ranks, or choose a mesh of {outside.world_size}"
        raise PlanError([Diagnostic("world-size", message, span, help)])
    if setup.device == "cuda" and not torch.cuda.is_available():
        message = f"rank {outside.rank} was started where there is no GPU"
        raise launch.LaunchError(message, "let CPU processes stand in for GPUs: device=cpu")


def _metrics(folder: Path | None, leads: bool, done: int | None) -> Any:
    if folder is None or not leads:
        return nullcontext()
    return MetricsWriter(folder / "metrics.jsonl", done=done)


@hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="train")
def task(config: DictConfig) -> None:
    """What Hydra calls, once for each job of a sweep."""
    now, outside = HydraConfig.get(), launch.outside_ranks()
    folder = Path(now.runtime.output_dir) if outside is None or outside.rank == 0 else None
    with outcome.job_reported(folder, sweep=now.mode == RunMode.MULTIRUN):
        run(config, folder, outside)


def main() -> None:
    """Hydra's command line, for one process of a job."""
    # Ranks are forked from this process: an OpenMP region here would hang children that use two threads.
    torch.set_num_threads(1)
    with outcome.command_reported():
        outside = launch.outside_ranks()
        if outside is not None and {"-m", "--multirun"} & set(sys.argv):
            raise launch.LaunchError(
                f"{outside.launcher} has started the ranks of one job, and -m asks for several",
                "start each job by itself",
            )
        if outside is not None and outside.rank > 0:
            # Only rank 0 makes an output folder: to Hydra we name one that is there, where it leaves nothing.
            sys.argv += [f"hydra.run.dir={tempfile.gettempdir()}", "hydra.output_subdir=null"]
            sys.argv += ["hydra/job_logging=none", "hydra/hydra_logging=none"]
        task()
        if outside is not None:
            _leave()


def _leave() -> None:
    """End a rank that has joined others without taking the interpreter down, as forked ranks end too.

    gloo's threads may still be letting go of tensors then, and one that needs the interpreter's lock for it
    aborts the process, whose work is done.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    interrupts.raise_again()
    main()
