"""The training loop of one rank."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import parallelizer as pz
from parallelizer.launching import heartbeat
from parallelizer.launching.stopping import stop_requests
from parallelizer.optim import learning_rate
from recipes.batches import Batches, local_device
from recipes.checkpoint import Keeper, place_of
from recipes.guards import Guards
from recipes.prepare import Job
from recipes.reporting import Reporting
from recipes.result import Result
from recipes.saved import note_saved
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
    guards = Guards(settings, model, optimizer, loss, leads=leads)
    # What another run has left in this folder stays, where this one neither goes on from it nor saves.
    cut_back = keeper.goes_on or settings.checkpoint_every > 0

    started = time.monotonic()
    validation, stopped = None, 0
    with (
        stop_requests() as asked,
        Reporting(job, mesh, device, first=first, cut_back=cut_back) as reporting,
    ):
        for step in range(first + 1, settings.steps + 1):
            heartbeat.beat(step)
            reporting.begin()
            rate = _set_learning_rate(optimizer, settings, step - 1)
            parts = batches.training(samples)
            with reporting.step(step, model, optimizer, parts):
                done = pz.train_step(model, parts, loss, optimizer, setup.clip, skip_nonfinite=True)
            samples += setup.workload.batch_size
            measured = reporting.measured(step, done, rate)
            stopped = guards.after(step, done, parts, samples=samples, stop=asked.signal)
            if step == settings.steps or (settings.eval_every and step % settings.eval_every == 0):
                heartbeat.beat(step, "evaluation")
                validation = pz.evaluate(model, batches.validation(), loss).item()
                measured["validation_loss"] = validation
            reporting.tell(measured)
            if stopped or keeper.is_due(step):
                heartbeat.beat(step, "checkpoint")
                guards.before_saving(step)
                keeper.save(step, samples, model, optimizer, wait=bool(stopped))
            reporting.saved(keeper)
            if stopped:
                break
        keeper.close()
        reporting.saved(keeper)
        reporting.ended(stopped)
    result = reporting.result(keeper, validation, stopped)
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
