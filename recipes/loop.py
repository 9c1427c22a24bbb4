"""The training loop of one rank."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import parallelizer as pz
from parallelizer.launching import heartbeat
from parallelizer.launching.stopping import stop_requests
from parallelizer.optim import learning_rate
from recipes.batches import Batches, local_device
from recipes.checkpoint import Keeper, place_of
from recipes.guards import Guards
from recipes.metrics import MetricsWriter
from recipes.prepare import Job
from recipes.progress import Progress
from recipes.result import Result
from recipes.settings import Settings


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

    started = time.monotonic()
    losses: list[float] = []
    validation, stopped = None, 0
    with (
        stop_requests() as asked,
        Progress(settings, quiet=not leads, unit=job.data.unit, done=first) as progress,
        _metrics(
            job.folder, leads, first if keeper.goes_on or settings.checkpoint_every else None
        ) as metrics,
    ):
        for step in range(first, settings.steps):
            heartbeat.beat(step + 1)
            begun = time.monotonic()
            rate = _set_learning_rate(optimizer, settings, step)
            parts = batches.training(samples)
            done = pz.train_step(model, parts, loss, optimizer, setup.clip, skip_nonfinite=True)
            samples += setup.workload.batch_size
            measured = {
                "step": step + 1,
                "loss": done.loss.item(),
                "grad_norm": done.grad_norm.item(),
                "lr": rate,
                "tokens_per_second": units / (time.monotonic() - begun),
            }
            losses.append(measured["loss"])
            stopped = guards.after(step + 1, done, parts, samples=samples, stop=asked.signal)
            last = step + 1 == settings.steps
            if last or (settings.eval_every and (step + 1) % settings.eval_every == 0):
                heartbeat.beat(step + 1, "evaluation")
                validation = pz.evaluate(model, batches.validation(), loss).item()
                measured["validation_loss"] = validation
            if metrics:
                metrics.write(**measured)
            progress.step(measured)
            if stopped or keeper.is_due(step + 1):
                heartbeat.beat(step + 1, "checkpoint")
                guards.before_saving(step + 1)
                keeper.save(step + 1, samples, model, optimizer, wait=bool(stopped))
            keeper.report()
            if stopped:
                break
        keeper.close()
    result = Result(
        tuple(losses), validation, job.data.baseline, 0.0, first, stopped, keeper.written, keeper.unwritten
    )
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
    return result


def _set_learning_rate(optimizer: torch.optim.Optimizer, settings: Settings, step: int) -> float:
    rate = learning_rate(
        step, peak=settings.lr, warmup=settings.warmup, total=settings.steps, final_ratio=settings.final_ratio
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _metrics(folder: Path | None, leads: bool, done: int | None) -> Any:
    if folder is None or not leads:
        return nullcontext()
    return MetricsWriter(folder / "metrics.jsonl", done=done)
