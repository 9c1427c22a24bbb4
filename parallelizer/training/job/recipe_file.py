"""A recipe as a command: the file that was started, its command line, and the place of its configuration."""

from __future__ import annotations

import argparse
import importlib
import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RecipeFile:
    """A recipe: its file, its module's name where it was started as one (`python -m recipes.train`), and the root
    configuration that it takes.
    """

    path: Path
    module: str | None = None
    config_name: str = "train"

    def typed(self, words: Sequence[str]) -> str:
        """What stands behind `python` in the command."""
        return shlex.join([*(["-m", self.module] if self.module else [str(self.path)]), *words])

    def folders(self, argv: Sequence[str]) -> list[str]:
        """The folders that are searched before the shipped configuration, in this order: `--config-dir`, and the folder
        `conf` beside the recipe or beside the folder that it is in.
        """
        given = self.words(argv).config_dir
        beside = (folder / "conf" for folder in self.path.resolve().parents[:2])
        own = next((folder for folder in beside if folder.is_dir()), None)
        return [*([given] if given else []), *([str(own)] if own else [])]

    def words(self, argv: Sequence[str]) -> argparse.Namespace:
        """Of Hydra's options `config_dir` and `config_name`; `rest` are the other words."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config-dir", "-cd")
        parser.add_argument("--config-name", "-cn", default=self.config_name)
        known = argparse.Namespace()
        _, known.rest = parser.parse_known_args(argv[1:], known)
        return known


def recipe_of(function: Callable[..., Any], config_name: str) -> RecipeFile:
    """The recipe that a function is defined in.

    Of one that was started as a script (`python recipes/train.py`) the folder above is searched for modules too, as it is by
    `python -m recipes.train`.
    """
    path, module = Path(inspect.getfile(function)), _module_of(function)
    above = str(path.resolve().parents[1])
    if module is None and above not in sys.path:
        sys.path.insert(0, above)
    return RecipeFile(path, module, config_name)


def importable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as other processes can import it: that of `python -m recipes.train` from `recipes.train`.

    What is in `__main__` would be pickled with all that it refers to.
    """
    module = _module_of(function)
    if function.__module__ != "__main__" or module is None:
        return function
    found: Callable[..., Any] = getattr(importlib.import_module(module), function.__name__)
    return found


def _module_of(function: Callable[..., Any]) -> str | None:
    """The name by which a function's module is imported; None for a script."""
    if function.__module__ != "__main__":
        return function.__module__
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else None
