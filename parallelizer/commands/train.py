"""`train`: the shipped training recipe, from any folder. What follows the name is Hydra's command line."""

from __future__ import annotations

import argparse

from parallelizer.commands.run_recipe import add_hydra_words, run_recipe

NAME = "train"
DOC = "train under a plan, with the unchanged recipe that `new` copies"
WHOLE_LINE = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """The words are Hydra's."""
    add_hydra_words(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train. Returns the exit status."""
    return run_recipe("train", arguments.overrides)
