"""Running a recipe of the package as `python -m` would."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from parallelizer.commands.import_torch import import_torch


def run_recipe(name: str, words: Sequence[str]) -> int:
    """Run `parallelizer.training.recipes.NAME` with the words of a command line. Returns the exit status; other ends are
    raised as SystemExit.
    """
    import_torch()
    module = f"parallelizer.training.recipes.{name}"
    sys.argv = [f"parallelizer {name}", *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0
