"""All checks of a run before a rank starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from parallelizer.configuration.origins import Origins
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.hugging_face.find_weights import weights_folder
from parallelizer.runtime.checkpoint.folder import steps_in
from parallelizer.training.data.choose_tokenizer import with_tokenizer
from parallelizer.training.data.corpus import Data, build_data
from parallelizer.training.data.entries import check_entries, check_vocabulary
from parallelizer.training.data.position import DataPosition, position_of
from parallelizer.training.job.job import Job
from parallelizer.training.keep.checkpoints import check_start, place_of, record_of
from parallelizer.training.keep.saved import has_saved, wrote
from parallelizer.training.settings import Settings, read_settings
from parallelizer.training.trackers import missing


def prepare(config: DictConfig, origins: Origins, folder: Path | None) -> Job:
    """Check everything that can be checked before a rank starts. Raises PlanError.

    The data of a dry run is empty.
    """
    setup = from_config(config, origins)
    settings = read_settings(config, origins)
    if not config.dry_run and (lacking := missing(settings.trackers, origins.span("train.trackers"))):
        raise PlanError(lacking)
    model = setup.build_model()
    program = setup.compile(model)
    if folder is not None and settings.save is not None and _is_finished(folder, settings):
        settings = replace(settings, save=None)
    weights = _weights(setup, settings, model, folder)
    setup.loss()
    setup.build_optimizer(torch.nn.Linear(1, 1))
    if config.dry_run:
        _check_start(folder, settings, setup, model, None)
        return Job(setup, program, settings, Data(torch.empty(0), torch.empty(0), 0, 0.0), folder)
    chosen = with_tokenizer(config.data, setup.model)
    data = build_data(chosen)
    data.check_fits(setup.workload.seq_len)
    check_entries(data, setup, settings.seed)
    check_vocabulary(data, setup, model)
    options: Any = OmegaConf.to_container(chosen, resolve=True)
    position = position_of(data, 0, seed=settings.seed, seq_len=setup.workload.seq_len, options=options)
    _check_start(folder, settings, setup, model, position)
    return Job(setup, program, settings, data, folder, weights, record_of(config, setup), position)


def _is_finished(folder: Path, settings: Settings) -> bool:
    """Whether the run of this folder has trained all its steps and saved its model where it should."""
    done = max(steps_in(place_of(settings, folder).folder), default=0)
    return done >= settings.steps and has_saved(folder, Path(settings.save or ""), settings.steps)


def _weights(setup: Setup, settings: Settings, model: torch.nn.Module, folder: Path | None) -> Path | None:
    """The folder of pretrained weights, if there is one, whose files fit the model as far as their headers tell; and
    for a run that writes into `folder` whether the trained model can be saved where it should be. Raises PlanError.
    """
    weights = weights_folder(setup.model, setup.origins) if settings.pretrained else None
    if weights is None and settings.save is None:
        return None
    from parallelizer.hugging_face.saving import check_savable
    from parallelizer.hugging_face.weights import look_up

    found = None if weights is None else look_up(model, weights)
    if settings.save is not None and folder is not None:
        check_savable(model, settings.save, found, replace=wrote(folder, Path(settings.save)))
    return weights


def _check_start(
    folder: Path | None,
    settings: Settings,
    setup: Setup,
    model: torch.nn.Module,
    position: DataPosition | None,
) -> None:
    """Whether a run that writes into `folder` can go on from the checkpoint that it finds. Raises PlanError."""
    if folder is None:  # a rank that joined others: rank 0 looks
        return
    found = check_start(place_of(settings, folder), settings, setup, model, position)
    if found:
        raise PlanError(found)
