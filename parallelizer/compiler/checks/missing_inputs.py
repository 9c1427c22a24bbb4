"""Checks that the batch contains the required inputs of the model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation


def missing_inputs(state: Compilation) -> Iterator[Diagnostic]:
    """Every parameter of forward that has no default is an entry of the batch, or made by the plan."""
    if state.workload is None or not state.workload.entries:
        return
    given = {*state.workload.entries, *(n for n, buffer in state.plan.batch.items() if buffer.make)}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for name, parameter in inspect.signature(state.model.forward).parameters.items():
        if parameter.kind in named and parameter.default is parameter.empty and name not in given:
            yield Diagnostic(
                "missing-input",
                f"forward of {type(state.model).__name__} takes {name!r}, but the batch has no entry with this name",
                None,
                f"add `{name}: {{shape: [...]}}` to model.batch; `data: NAME` gives the name that the data has for it",
            )
