"""Modules whose experts are shared out: they leave their tensor styles, and are told how their tokens lie over tp."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from parallelizer.compiler.compilation import Compilation
from parallelizer.language.plan import REPLICATE, TENSOR_AXES, Flow, Mesh
from parallelizer.styles.application import Application

STYLES = ("prepare-io", "prepare-input")
"""The styles that say how the inputs of a region lie."""


def share_experts(state: Compilation) -> None:
    """Where `experts` applies, no tensor style places parameters: both would split them. Its option `layout` says how tokens
    lie over tp, as the rule of the nearest module around it has them.
    """
    shared = {a.module for a in state.applications if a.slot == "experts"}
    if not shared:
        return
    state.applications = [
        dataclasses.replace(
            a, options={**a.options, "layout": layout_over_tp(state.mesh, state.applications, a.module)}
        )
        if a.slot == "experts"
        else a
        for a in state.applications
        if not (a.slot == "params" and a.module in shared)
    ]


def layout_over_tp(mesh: Mesh, applications: Iterable[Application], path: str) -> str:
    """How plain tensors lie over tp inside the module at `path`: one of `styles.experts.stream.LAYOUTS`. `split` without tp."""
    if mesh.size(*TENSOR_AXES) == 1:
        return "split"
    given = tuple(applications)
    for around in _upwards(path):
        for application in given:
            if (
                application.module == around
                and application.axis in TENSOR_AXES
                and application.style in STYLES
            ):
                return _inside(application)
    return "equal"


def _inside(application: Application) -> str:
    """How plain tensors lie in the region of an application."""
    options = application.options
    flows: dict[str, Flow] = options.get("input") or {}
    flow = next(iter(flows.values()), Flow())
    placed = flow.wanted or flow.arrives or REPLICATE
    if placed.kind == "shard":
        return "split"
    if options.get("grad") != "partial":
        return "equal"
    leaving: dict[str, Flow] = options.get("output") or {}
    output = next(iter(leaving.values()), Flow())
    arrives = output.arrives or REPLICATE
    return "terms" if arrives.kind == "partial" else "joined"


def _upwards(path: str) -> list[str]:
    """The path, and those of the modules around it."""
    segments = path.split(".") if path else []
    return [".".join(segments[:n]) for n in range(len(segments), -1, -1)]
