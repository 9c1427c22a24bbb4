"""The dry run for people: the plan, and what one step of it sends and holds."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from torch import nn

from parallelizer.compiler.parameter_shards import parameter_shards
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.diagnostics.units import size
from parallelizer.proof.certificate import find, told
from parallelizer.report.capacity import COMFORTABLE, VERDICTS, Capacity, capacity, verdict
from parallelizer.report.rows.experts import Sharing
from parallelizer.report.rows.precision import precision
from parallelizer.report.text import experts as show_experts
from parallelizer.report.text import plan as show_plan
from parallelizer.report.text import precision as show_precision
from parallelizer.report.text import stages as show_stages
from parallelizer.report.text import step as show_step
from parallelizer.report.text import tables
from parallelizer.report.text import time as show_time
from parallelizer.report.what_would_fit import Alternative, what_would_fit
from parallelizer.simulate.record.trace import Trace
from parallelizer.simulate.time.predict import StepTime
from parallelizer.simulate.trace_failed import CODE as TRACE_FAILED
from parallelizer.styles.application import Program


def write(
    setup: Setup,
    program: Program,
    model: nn.Module,
    step: Trace | None,
    found: Sequence[Diagnostic],
    rank: int = 0,
    time: StepTime | None = None,
    full: StepTime | None = None,
    shared: Sharing | None = None,
    plain: Trace | None = None,
) -> None:
    """Print a dry run: tables to stdout, findings to stderr. `time` is the step's, if it could be predicted. `plain` is the
    traced step of the plan without float8, and `full` its time. `shared` says how experts are shared out.
    """
    show_diagnostics.write(found, sys.stderr)
    show_plan.write(program, parameter_shards(program, model, rank), sys.stdout, rank=rank)
    show_stages.write(program, model, tables.console(sys.stdout))
    show_experts.write(shared, sys.stdout, int(setup.hardware.get("devices_per_node") or 0) or None)
    show_precision.write(precision(program, model, step, plain), sys.stdout, time, full)
    if step is not None:
        show_stages.write_messages(program, step.cuts, tables.console(sys.stdout))
        show_step.write(step, sys.stdout, device=setup.device, hardware=setup.hardware, dtype=_dtype(model))
        if time is not None:
            show_time.write(time, sys.stdout, device=setup.device)
        room = capacity(step, setup.hardware)
        if room is not None and not room.fits:
            sys.stdout.flush()  # the figures of other settings take their time
            enough = int(COMFORTABLE * room.total)
            _would_fit(what_would_fit(setup, program, model, step, enough), room, sys.stdout)
        if setup.mesh.world_size > 1:
            sys.stdout.write(f"proof: {told(find(setup, model))}\n")
    elif failed := next((d for d in found if d.code == TRACE_FAILED), None):
        tables.console(sys.stdout).print(f"collectives, memory and time are not known: {failed.message}")
    sys.stdout.flush()


def _dtype(model: nn.Module) -> str | None:
    """The dtype of a model's parameters, those of most if they differ."""
    counts: Counter[str] = Counter()
    for param in model.parameters():
        counts[str(param.dtype).removeprefix("torch.")] += param.numel()
    return counts.most_common(1)[0][0] if counts else None


def _would_fit(found: Sequence[Alternative], room: Capacity, stream: TextIO) -> None:
    """Print what a step needs with each change, those that fit first."""
    if not found:
        return
    stream.write(f"what would fit {size(room.total)}: the peak with\n")
    width = max(len(one.change) for one in found)
    for one in sorted(found, key=lambda one: VERDICTS.index(verdict(one.peak, room.total))):
        said = verdict(one.peak, room.total)
        stream.write(f"  {one.change:<{width}}  {size(one.peak):>10}  {said}\n")
    stream.write("\n")
