"""The commands of recipes. This file imports quickly; the calls import modules that take a second or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from parallelizer.child import cuda_use
from parallelizer.diagnostics import interrupts

if TYPE_CHECKING:
    from parallelizer.training.job.job import Job
    from parallelizer.training.sampling.job import SamplingJob
    from parallelizer.training.watch.result import Result


def run(train: Callable[[Job], Result], *, config: str = "train") -> None:
    """The command line of a training recipe, for `if __name__ == "__main__"`.

    Composes the root configuration `config` with the arguments of the command line, checks it, prints the
    plan, and calls `train` on each rank of the mesh: in processes that it starts, or in those that torchrun
    or Slurm has started. Then it prints the result of the run. Hydra's options (`-m`, `--cfg job`,
    `--config-dir`, ...), `dry_run=true` and the Slurm launcher work as documented. A folder `conf` next to
    the recipe, or next to the recipe's folder, is searched before the shipped configuration.

    If there is an error, ends the process with the exit status of docs/stable.md; otherwise returns.
    """
    interrupts.end_at_once()
    cuda_use.ask_by_nvml()
    from parallelizer.training.job.run import main

    interrupts.raise_again()
    main(train, config)


def run_sampling(generate: Callable[[SamplingJob], list[list[int]]], *, config: str = "generate") -> None:
    """The command line of a sampling recipe, like `run`, for a function that returns the tokens of each
    text.

    The command names a checkpoint (`checkpoint=runs/a`), and uses its model, plan and tokenizer. The
    function writes the text to stdout; all other output goes to stderr. No output folder is made.
    """
    interrupts.end_at_once()
    cuda_use.ask_by_nvml()
    from parallelizer.training.sampling.run import main

    interrupts.raise_again()
    main(generate, config)
