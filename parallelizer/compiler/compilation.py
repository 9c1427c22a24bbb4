"""The data that the passes of the compiler pass on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic, Span
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.pipeline.stages import Stages
from parallelizer.language.plan import (
    Mesh,
    Option,
    Plan,
    Rule,
    StyleDefaults,
    StyleUse,
)
from parallelizer.language.workload import Workload
from parallelizer.styles.application import Application, Slot


@dataclass
class Compilation:
    """What the passes hand on to each other.

    `modules` and `parameters` are by name, each once; `winners` are by module and slot.
    """

    plan: Plan
    model: nn.Module
    mesh: Mesh
    workload: Workload | None
    defaults: Mapping[str, StyleDefaults]
    max_unsharded: Option | None = None
    pipeline: Pipeline | None = None
    modules: dict[str, nn.Module] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    winners: dict[str, dict[Slot, tuple[Rule, StyleUse]]] = field(default_factory=dict)
    applications: list[Application] = field(default_factory=list)
    stages: Stages | None = None
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def find(
        self, code: str, message: str, span: Span | None, help_text: str | None = None, **more: Any
    ) -> None:
        """Add a diagnostic."""
        self.diagnostics.append(Diagnostic(code, message, span, help_text, **more))
