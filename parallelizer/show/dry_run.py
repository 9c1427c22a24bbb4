"""The dry run for people: the plan, and what one step of it sends and holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from parallelizer.checks.layout_flow import following
from parallelizer.diagnostics import Diagnostic, PlanError, has_errors
from parallelizer.lints import lint
from parallelizer.program import Program
from parallelizer.setup import Setup
from parallelizer.show import diagnostics as show_diagnostics
from parallelizer.show import plan as show_plan
from parallelizer.show import step as show_step
from parallelizer.simulate.each_class import trace_classes
from parallelizer.simulate.trace import Trace

Findings = tuple[Diagnostic, ...]


def trace_step(
    setup: Setup, program: Program, model: nn.Module, rank: int = 0
) -> tuple[Trace | None, Findings]:
    """One step as `rank` of the program's world, with the classes of all ranks and the findings of compiling,
    following, tracing and linting.

    There is no step, and a finding says why, when it cannot run. Traced in child processes: no process group
    may stand in this one.
    """
    torch.set_num_threads(1)  # an OpenMP region before a fork hangs the child
    flow: Findings = ()
    try:
        with following(setup, program, model) as findings:
            try:
                step = trace_classes(program, model, setup.recipe(), rank)
            finally:
                flow = findings()
        return step, (*program.diagnostics, *flow, *lint(setup, program, model, step))
    except PlanError as error:
        # What the plan is to blame for has been explained.
        more = flow if has_errors(flow) else error.diagnostics
        return None, (*program.diagnostics, *more)


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
    show_plan.write(program, model, sys.stdout, rank=rank)
    if step is not None:
        show_step.write(step, sys.stdout, device=setup.device, hardware=setup.hardware)
    sys.stdout.flush()
