"""The dry run for people: the plan, and what one step of it sends and holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from parallelizer.compiler.parameter_shards import parameter_shards
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.proof.certificate import find, told
from parallelizer.report.text import plan as show_plan
from parallelizer.report.text import step as show_step
from parallelizer.simulate.record.trace import Trace
from parallelizer.styles.application import Program


def write(
    setup: Setup,
    program: Program,
    model: nn.Module,
    step: Trace | None,
    found: Sequence[Diagnostic],
    rank: int = 0,
) -> None:
    """Print a dry run: tables to stdout, findings to stderr."""
    show_diagnostics.write(found, sys.stderr)
    show_plan.write(program, parameter_shards(program, model, rank), sys.stdout, rank=rank)
    if step is not None:
        show_step.write(step, sys.stdout, device=setup.device, hardware=setup.hardware)
    if step is not None and setup.mesh.world_size > 1:
        sys.stdout.write(f"proof: {told(find(setup, model))}\n")
    sys.stdout.flush()
