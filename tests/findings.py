"""What the compiler says of a plan, and which characters of it are marked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import parallelizer as pz
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.language.plan import Mesh
from tests.parity import plan, style_defaults


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def mesh_of(**sizes: int) -> Mesh:
    """A mesh whose every size was set in a file `mesh`, at the column of its own value."""
    return Mesh(sizes, {axis: Span("mesh", 1, size, size + 1) for axis, size in sizes.items()})


def compiled(text: str, build: Callable[[], nn.Module], mesh: Mesh | None = None, **more: Any) -> pz.Program:
    """The program of a plan's text."""
    options: Mapping[str, Mapping[str, Any]] = more.pop("options", {})
    return pz.compile(plan(text), on_meta(build), mesh or Mesh({}), defaults=style_defaults(options), **more)


def findings(
    text: str, build: Callable[[], nn.Module], mesh: Mesh | None = None, **more: Any
) -> tuple[Diagnostic, ...]:
    """Every diagnostic, whether errors or not."""
    try:
        return compiled(text, build, mesh, **more).diagnostics
    except PlanError as error:
        return error.diagnostics


def finding(text: str, build: Callable[[], nn.Module], mesh: Mesh | None = None, **more: Any) -> Diagnostic:
    """The only diagnostic."""
    found = findings(text, build, mesh, **more)
    assert len(found) == 1, [f"{d.code}: {d.message}" for d in found]
    return found[0]


def marked(text: str, place: Diagnostic | Span | None) -> str:
    """The characters that a diagnostic points at."""
    span = place.span if isinstance(place, Diagnostic) else place
    assert span is not None and span.file.endswith("plan.yaml"), span
    return text.splitlines()[span.line - 1][span.column - 1 : span.end_column - 1]
