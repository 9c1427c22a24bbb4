"""Lazy modules: their parameters have no sizes yet, so they can be neither checked nor sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.fold import fold_paths

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation


def lazy_modules(state: Compilation) -> Iterator[Diagnostic]:
    """Every parameter and buffer has a shape."""
    lacking = {
        path: type(module).__name__
        for path, module in state.modules.items()
        if any(is_lazy(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    }
    if lacking:
        kinds = sorted(set(lacking.values()))
        yield Diagnostic(
            "lazy-module",
            f"{', '.join(fold_paths(list(lacking))[:3]) or 'the root'} ({', '.join(kinds[:3])}) has parameters without a shape",
            None,
            "build the model with explicit sizes, without lazy modules",
        )
