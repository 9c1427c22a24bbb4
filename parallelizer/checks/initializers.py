"""A model on the meta device has no values: every module that owns some must know how to make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics import Diagnostic
from parallelizer.fold import fold_paths
from parallelizer.hugging_face.recognise import initializer_of

if TYPE_CHECKING:
    from parallelizer.program import Compilation


def initializers(state: Compilation) -> Iterator[Diagnostic]:
    """Modules with parameters or buffers of their own on meta need `reset_parameters`."""
    if initializer_of(state.model) is not None:
        return
    lacking = []
    for path, module in state.modules.items():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(t.is_meta for t in own) and not callable(getattr(module, "reset_parameters", None)):
            lacking.append(path)
    if lacking:
        kinds = sorted({type(state.modules[p]).__name__ for p in lacking})
        yield Diagnostic(
            "no-initializer",
            f"{', '.join(fold_paths(lacking)[:3]) or 'the root'} ({', '.join(kinds[:3])}) cannot make its values",
            None,
            "a module with parameters or buffers of its own needs a method reset_parameters() that fills them",
        )
