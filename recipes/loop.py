"""The training loop of one rank."""

from __future__ import annotations

import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.device_mesh import DeviceMesh

import parallelizer as pz
from parallelizer.launching import heartbeat
from parallelizer.launching.stopping import stop_requests
from parallelizer.optim import learning_rate
from recipes.batches import Batches, local_device
from recipes.checkpoint import Keeper, is_restart, place_of
from recipes.first_step import FirstStep
from recipes.guards import Guards
from recipes.live import View
from recipes.memory import memory
from recipes.metrics import MetricsWriter
from recipes.prepare import Job
from recipes.profiling import Profiling
from recipes.progress import Progress
from recipes.result import Result
from recipes.saved import note_saved
from recipes.settings import Settings
from recipes.trackers import Trackers


def train(job: Job) -> Result:
    """One rank's run, in an initialised world.

    Ends early, behind a checkpoint, when the ranks were asked to stop. Raises PlanError where the data, a checkpoint or
    the ranks are not as they must be.
    """
    setup, settings = job.setup, job.settings
    # The logits leave as a view of a DTensor's local tensor; nothing here changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = pz.build_mesh(setup.mesh, setup.device)
    pz.seed_ranks(mesh, settings.seed)
    device = local_device(setup.device)
    model = setup.build_model()
    whole = setup.whole_model(model)
    pz.apply(job.program, model, mesh)
    leads = dist.get_rank() == 0
    place = place_of(settings, job.folder or Path())
    keeper = Keeper(place, settings, job.record, job.position, mesh, leads=leads)
    begun_from = keeper.find()
    if begun_from is not None:
        pz.materialize(model, device=device, seed=settings.seed, whole=whole, skip_saved=True)
    elif job.weights is not None:
        pz.load_pretrained(model, job.weights, device=device)
    else:
        pz.materialize(model, device=device, seed=settings.seed, whole=whole)
    optimizer, loss = setup.build_optimizer(model), setup.loss()
    first, samples = keeper.load(begun_from, model, optimizer) if begun_from is not None else (0, 0)
    batches = Batches(job.data, job.program.plan, setup.workload, settings, mesh, device)
    units = setup.workload.batch_size * job.data.units(setup.workload.seq_len)

    guards = Guards(settings, model, optimizer, loss, leads=leads)
    forecast = job.forecast
    compared = _first_step(job, mesh, device, leads=leads)
    view = _view(job, first)

    started = time.monotonic()
    losses: list[float] = []
    rates: list[float] = []
    validation, stopped, skipped = None, 0, 0
    # What another run has left in this folder stays, where this one neither goes on from it nor saves.
    done_before = first if keeper.goes_on or settings.checkpoint_every else None
    with (
        stop_requests() as asked,
        Profiling(settings.profile, job.folder, dist.get_rank(), device) as profiling,
        _trackers(job, first) if leads else nullcontext() as trackers,
        Progress(settings, view, quiet=not leads) as progress,
        _metrics(job.folder, leads, done_before) as metrics,
    ):
        for step in range(first, settings.steps):
            heartbeat.beat(step + 1)
            begun = time.monotonic()
            rate = _set_learning_rate(optimizer, settings, step)
            parts = batches.training(samples)
            looked_at: AbstractContextManager[Any] = nullcontext()
            if compared is not None and step == first:
                looked_at = compared.watched(model, optimizer, parts, memory=not profiling.covers(step + 1))
            with profiling.step(step + 1), looked_at:
                done = pz.train_step(model, parts, loss, optimizer, setup.clip, skip_nonfinite=True)
            samples += setup.workload.batch_size
            measured = {
                "step": step + 1,
                "loss": done.loss.item(),
                "grad_norm": done.grad_norm.item(),
                "lr": rate,
                "tokens_per_second": units / (time.monotonic() - begun),
            }
            profiling.after(step + 1)
            if (mfu := forecast.mfu(units / measured["tokens_per_second"])) is not None:
                measured["mfu"] = mfu
            losses.append(measured["loss"])
            rates.append(measured["tokens_per_second"])
            stopped = guards.after(step + 1, done, parts, samples=samples, stop=asked.signal)
            skipped += done.skipped is not None
            last = step + 1 == settings.steps
            if last or (settings.eval_every and (step + 1) % settings.eval_every == 0):
                heartbeat.beat(step + 1, "evaluation")
                validation = pz.evaluate(model, batches.validation(), loss).item()
                measured["validation_loss"] = validation
            if metrics:
                metrics.write(**measured)
            if trackers:
                trackers.write(step + 1, {k: v for k, v in measured.items() if k != "step"})
            view.skipped = skipped
            progress.step(measured, memory(device) if leads else None)
            if compared is not None and step == first:
                compared.tell(step + 1)
                view.compared = compared.peaks
            if stopped or keeper.is_due(step + 1):
                heartbeat.beat(step + 1, "checkpoint")
                guards.before_saving(step + 1)
                keeper.save(step + 1, samples, model, optimizer, wait=bool(stopped))
            keeper.report()
            view.saved = keeper.written_step
            if stopped:
                break
        keeper.close()
        view.saved = keeper.written_step
        if trackers and stopped:
            trackers.status = "stopped"
    result = Result(
        tuple(losses),
        validation,
        job.data.baseline,
        0.0,
        first,
        stopped,
        keeper.written,
        keeper.unwritten,
        tuple(rates),
        units,
        job.data.unit,
        skipped,
        memory(device) if leads else None,
        forecast.planned.peak if forecast.planned is not None else None,
        profiled=profiling.written,
    )
    if result.speed is not None:
        result = replace(result, mfu=forecast.mfu(units / result.speed[1]))
    if not stopped:
        result = _finish(job, model, batches, result)
    return replace(result, seconds=time.monotonic() - started)


def _finish(job: Job, model: torch.nn.Module, batches: Batches, result: Result) -> Result:
    """What follows the last step."""
    pz.restore_buffers(model)
    if result.validation_loss is None:
        loss = pz.evaluate(model, batches.validation(), job.setup.loss()).item()
        result = replace(result, validation_loss=loss)
    if job.settings.save is not None:
        pz.save_pretrained(model, job.settings.save)
        if dist.get_rank() == 0 and job.folder is not None:
            note_saved(job.folder, Path(job.settings.save), job.settings.steps)
    return result


def _set_learning_rate(optimizer: torch.optim.Optimizer, settings: Settings, step: int) -> float:
    rate = learning_rate(
        step, peak=settings.lr, warmup=settings.warmup, total=settings.steps, final_ratio=settings.final_ratio
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _first_step(job: Job, mesh: DeviceMesh, device: torch.device, *, leads: bool) -> FirstStep | None:
    """Who compares the first step with the dry run; None where nobody does: ranks that were started again have done so."""
    if not job.settings.compare or is_restart():
        return None
    return FirstStep(job.forecast, job.program, mesh, device, leads=leads)


def _view(job: Job, done: int) -> View:
    planned = job.forecast.planned
    return View(
        f"{Path(job.setup.plan.name).stem} on {job.setup.mesh}",
        job.settings.steps,
        job.data.unit,
        done,
        planned.peak if planned is not None else None,
    )


def _trackers(job: Job, done: int) -> Trackers:
    config: Any = OmegaConf.to_container(OmegaConf.create(job.record.get("config", "")), resolve=False)
    return Trackers(job.settings.trackers, config, job.folder or Path(), done)


def _metrics(folder: Path | None, leads: bool, done: int | None) -> Any:
    if folder is None or not leads:
        return nullcontext()
    return MetricsWriter(folder / "metrics.jsonl", done=done)
