"""Paths of modules and parameters as every table shows them: folded into few globs, the root with a name."""

from __future__ import annotations

from collections.abc import Iterable

from parallelizer.language.fold import fold_paths

ROOT = "(root)"
"""How the root module is shown, whose path is empty; `explain` accepts it back."""


def shown_paths(paths: Iterable[str]) -> list[str]:
    """The globs that stand for some paths and for no others."""
    return [glob or ROOT for glob in fold_paths(paths)]
