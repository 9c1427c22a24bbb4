"""Running a recipe of the package as `python -m` would: what `train` and `generate` share."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence

from parallelizer.commands.import_torch import import_torch


def add_hydra_words(parser: argparse.ArgumentParser) -> None:
    """What `--help` says of a command line that Hydra reads."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides and options of Hydra")


def run_recipe(name: str, words: Sequence[str]) -> int:
    """Run `parallelizer.training.recipes.NAME` with the words of a command line. Returns the exit status; other ends are
    raised as SystemExit.
    """
    import_torch()
    module = f"parallelizer.training.recipes.{name}"
    sys.argv = [f"parallelizer {name}", *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0
