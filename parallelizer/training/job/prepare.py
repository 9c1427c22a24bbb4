"""All checks of a run before a rank starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from parallelizer.compiler.observe.families import vocabulary_of
from parallelizer.configuration.origins import Origins
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.hugging_face.find_weights import weights_folder
from parallelizer.proof.unsure import UNSURE
from parallelizer.runtime.checkpoint.choose import choose, unwritable
from parallelizer.runtime.checkpoint.fit import misfits
from parallelizer.runtime.launch.outside import OutsideRanks
from parallelizer.training.data.choose_tokenizer import with_tokenizer
from parallelizer.training.data.corpus import Data, build_data
from parallelizer.training.data.entries import check_entries, check_vocabulary
from parallelizer.training.data.position import DataPosition, check_same_data, position_of
from parallelizer.training.job.job import Job
from parallelizer.training.job.ranks import check_ranks
from parallelizer.training.keep.checkpoints import begins_anew, place_of, record_of
from parallelizer.training.keep.saved import saved_steps
from parallelizer.training.settings import read_settings
from parallelizer.training.trackers import missing


def prepare(
    config: DictConfig,
    origins: Origins,
    folder: Path | None,
    outside: OutsideRanks | None = None,
    command: str = "",
) -> Job:
    """Check everything that can be checked before a rank starts. Raises PlanError and LaunchError.

    `folder` is the output folder of the process that looks for all ranks, and None in a rank that joins others. `outside`
    are the ranks that torchrun or Slurm has started, and `command` is what they would have to start. The data of a dry run
    is empty.
    """
    setup = from_config(config, origins)
    model = setup.build_model()
    program = setup.compile(model, unsure=UNSURE)
    setup.loss()
    setup.build_optimizer(torch.nn.Linear(1, 1))

    settings, record = read_settings(config, origins), record_of(config, setup)
    place = place_of(settings, folder) if folder is not None else None
    save = settings.save if folder is not None else None
    before = saved_steps(folder, Path(save)) if folder is not None and save is not None else None
    if not config.dry_run:
        if lacking := missing(settings.trackers, origins.span("train.trackers")):
            raise PlanError(lacking)
        check_ranks(setup, settings, outside, command)

    weights = weights_folder(setup.model, origins) if settings.pretrained else None
    if weights is not None or save is not None:
        from parallelizer.hugging_face.check_folders import check_folders

        check_folders(model, weights, save, replace=before is not None)

    opened, found = None, list[Diagnostic]()
    if place is not None:
        if settings.checkpoint_every:
            found += unwritable(place.folder, origins.span("train.checkpoint_dir"))
        opened = choose(place, anew=begins_anew(settings), span=origins.span("train.resume"))
        done = opened.step if opened is not None and opened.path.parent == place.folder else 0
        if done >= settings.steps and before == settings.steps:  # nothing is left to train and to save
            settings = replace(settings, save=None)
    if opened is not None:
        optimizer, where = setup.build_optimizer(model), Span(str(opened.path))
        found += misfits(model, optimizer, opened.metadata, opened.about, where)
    if config.dry_run:
        if found:
            raise PlanError(found)
        return Job(setup, program, settings, Data(torch.empty(0), torch.empty(0), 0, 0.0), folder)

    rows = vocabulary_of(model, setup.model)
    chosen = with_tokenizer(config.data, setup.model)
    data = build_data(chosen)
    data.check_fits(setup.workload.seq_len)
    check_entries(data, setup, settings.seed)
    check_vocabulary(data, rows, origins)
    options: Any = OmegaConf.to_container(chosen, resolve=True)
    position = position_of(data, 0, seed=settings.seed, seq_len=setup.workload.seq_len, options=options)
    if opened is not None:
        saved = DataPosition.from_json(opened.state["position"])
        found += check_same_data(saved, position, origins)
    if found:
        raise PlanError(found)
    return Job(setup, program, settings, data, folder, weights, record, position)
