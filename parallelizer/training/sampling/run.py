"""`training.run_sampling`: all parts of a sampling command except the sampling itself."""

from __future__ import annotations

import inspect
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from parallelizer.configuration.override_mistakes import OverrideSyntaxError
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.yaml_nodes import shown_path
from parallelizer.runtime.launch import launcher as launch
from parallelizer.training.job import outcome
from parallelizer.training.job.ranks import check_ranks
from parallelizer.training.job.recipe_file import RecipeFile, recipe_of
from parallelizer.training.sampling.job import SamplingJob
from parallelizer.training.sampling.prepare import Words, prepare, read_words

Generate = Callable[[SamplingJob], list[list[int]]]
"""A recipe's function: one rank's part, which returns the tokens of each text."""


def main(generate: Generate, config_name: str) -> None:
    """The command of a recipe, for one process of a job."""
    torch.set_num_threads(1)  # ranks are forked from this process
    recipe, argv = recipe_of(generate, config_name), sys.argv[1:]
    if {"-h", "--help"} & {*argv}:
        usage = inspect.getdoc(inspect.getmodule(generate)) or ""
        print(f"{usage}\n\n{(config_folder() / 'generate.yaml').read_text()}", end="")
        return
    with outcome.command_reported(recipe), tempfile.TemporaryDirectory(prefix="parallelizer-") as folder:
        outside = launch.outside_ranks()
        try:
            run(generate, recipe, read_words(argv, recipe), Path(folder), outside)
        except OverrideSyntaxError as error:
            show_diagnostics.write([error.diagnostic], sys.stderr)
            sys.exit(2)
    if outside is not None:
        launch.leave()


def run(
    generate: Generate,
    recipe: RecipeFile,
    words: Words,
    folder: Path,
    outside: launch.OutsideRanks | None,
) -> None:
    """Check, start or join the ranks, and say how it went. Raises PlanError, LaunchError and OverrideSyntaxError."""
    job = prepare(words, folder)
    setup, leads = job.setup, outside is None or outside.rank == 0
    if leads:
        origin = job.checkpoint or job.weights
        print(f"from {shown_path(origin) if origin else ''}, on {setup.mesh}", file=sys.stderr, flush=True)
    begun = time.monotonic()
    check_ranks(setup, job.settings, outside, recipe.typed(sys.argv[1:]))
    if outside is None:
        made = launch.start(
            started,
            (generate, job),
            ranks=setup.mesh.world_size,
            device=setup.device,
            start_timeout=job.settings.start_timeout,
            collective_timeout=job.settings.collective_timeout,
        )[0]
    else:
        limit = job.settings.collective_timeout
        made = launch.join(started, (generate, job), device=setup.device, collective_timeout=limit)
    if leads:
        seconds = time.monotonic() - begun
        print(f"{sum(map(len, made))} {job.tokenizer.unit}s in {seconds:.1f} s", file=sys.stderr)


def started(generate: Generate, job: SamplingJob) -> list[list[int]]:
    """One of the ranks."""
    return generate(job)
