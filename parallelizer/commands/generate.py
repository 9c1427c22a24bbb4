"""`generate`: the shipped recipe for text from a checkpoint, from any folder. What follows the name is Hydra's command line."""

from __future__ import annotations

import argparse

from parallelizer.commands.run_recipe import add_hydra_words, run_recipe

NAME = "generate"
DOC = "sample text from a checkpoint, with the unchanged recipe that `new` copies"
WHOLE_LINE = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """The words are Hydra's."""
    add_hydra_words(parser)


def run(arguments: argparse.Namespace) -> int:
    """Generate. Returns the exit status."""
    return run_recipe("generate", arguments.overrides)
