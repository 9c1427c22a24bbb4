"""Dotted paths of before, which configurations, checkpoints and modules of users still name: the one table of them.

What is now `parallelizer.training` was in `recipes/` before, and copies of that name it. A finder imports such a module
as the present one. It comes last: a file of that name in the user's own `recipes/` is found before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_DATA = "parallelizer.training.data"

OLD: dict[str, tuple[str, ...]] = {
    "recipes.data": (_DATA, f"{_DATA}.corpus", f"{_DATA}.source"),
    "recipes.data.corpus": (f"{_DATA}.corpus",),
    "recipes.data.documents": (f"{_DATA}.documents",),
    "recipes.data.files": (f"{_DATA}.files",),
    "recipes.data.fingerprint": (f"{_DATA}.source",),
    "recipes.data.halves": (f"{_DATA}.halves",),
    "recipes.data.hf_dataset": (f"{_DATA}.hf_dataset",),
    "recipes.data.hf_tokenizer": (f"{_DATA}.hf_tokenizer",),
    "recipes.data.images": (f"{_DATA}.images",),
    "recipes.data.loader": (f"{_DATA}.windows",),
    "recipes.data.packing": (f"{_DATA}.packing",),
    "recipes.data.source": (f"{_DATA}.source",),
    "recipes.data.stdlib": (f"{_DATA}.stdlib",),
    "recipes.data.text": (f"{_DATA}.text",),
    "recipes.data.tokenizer": (f"{_DATA}.tokenizer", f"{_DATA}.choose_tokenizer"),
    "recipes.outcome": ("parallelizer.training.job.outcome",),
    "recipes.sampling_settings": ("parallelizer.training.sampling.settings",),
    "recipes.settings": ("parallelizer.training.settings",),
}
"""By the module of before those that have its names now."""


def install() -> None:
    """From now on `import` finds the modules of before. Does nothing where they are found already."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def current(path: str) -> str:
    """The dotted path of today for one of before; any other path as it is."""
    module, _, name = path.rpartition(".")
    if module not in OLD:
        return path
    return f"{OLD[module][0]}.{name}"


class _Finder(MetaPathFinder):
    """Finds a module of the table, and the package `recipes` where the user has none."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in OLD and fullname != "recipes":
            return None
        spec = ModuleSpec(fullname, _Forwarding() if fullname in OLD else None, is_package=True)
        spec.submodule_search_locations = []  # what is below is in the table too
        return spec


class _Forwarding(Loader):
    """Makes a module whose names are those of others."""

    def exec_module(self, module: ModuleType) -> None:
        others = [importlib.import_module(name) for name in OLD[module.__name__]]

        def found(name: str) -> object:
            for other in others:
                if hasattr(other, name):
                    return getattr(other, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = found  # type: ignore[method-assign]
        module.__dir__ = lambda: sorted({name for other in others for name in dir(other)})  # type: ignore[method-assign]
