"""`train`: the shipped training recipe, from any folder. What follows the name is Hydra's command line."""

from __future__ import annotations

import argparse

from parallelizer.commands.run_recipe import run_recipe

NAME = "train"
DOC = "train under a plan: the recipe that `new` copies, as it is"
WHOLE_LINE = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Hydra reads the words."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides and options of Hydra")


def run(arguments: argparse.Namespace) -> int:
    """Train. Returns the exit status."""
    return run_recipe("train", arguments.overrides)
