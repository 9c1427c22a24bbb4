"""Axes above 1 that no rule uses: all their ranks would compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.plan import AXES, DATA_AXES, EXPERT

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation


def unused_axes(state: Compilation) -> Iterator[Diagnostic]:
    """Model axes (`tp_outer`, `tp`) and `cp` need a style that stands on them; the data axes are used by the batch. A mesh with
    `pp` and no rule of `stage` was refused before.
    """
    shared_out = state.mesh.ep > 1 and any(a.slot == "experts" for a in state.applications)
    if state.mesh.ep > 1 and not shared_out:
        yield Diagnostic(
            "unused-axis",
            f"no rule uses ep={state.mesh.ep}: no module has its experts shared out",
            state.mesh.spans.get(EXPERT),
            "write the style `experts` for the module that computes the experts, or set ep to 1",
            "warning",
        )
    used = {a for application in state.applications if application.slot != "fsdp" for a in application.axes}
    for axis in AXES:
        size = state.mesh.sizes[axis]
        if size == 1 or axis in used or axis in ("dp_replicate", "dp_shard"):
            continue
        if axis == "tp" and shared_out:  # ep takes its ranks first: they share out tokens and experts
            continue
        if axis == "cp" and state.plan.batch:  # every rank has its part of the tokens
            continue
        if axis in DATA_AXES:
            help_text = "add `context-parallel` to the modules that call attention"
        else:
            help_text = f"add rules with styles that use {axis}, or set it to 1"
        yield Diagnostic(
            "unused-axis",
            f"no rule uses {axis}={size}: all its ranks would compute the same",
            state.mesh.spans.get(axis),
            help_text,
            "warning",
        )
