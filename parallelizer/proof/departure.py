"""The line of the user's code on which ranks first compute what the unsharded run does not have.

A proof that fails in forward names the first module whose output differs. The lines of the forward run in the same order
unsharded and on ranks. However a plan splits a result, each value that a rank holds stands somewhere in the whole result, or
is a term of a sum over an axis. The first line for which neither is true computes with a part as if it were the whole.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Sequence
from typing import Any

import torch

from parallelizer.child import children
from parallelizer.child.children import WorldError, in_children
from parallelizer.compiler.observe.users_code import written_here
from parallelizer.diagnostics.diagnostic import PlanError, Span
from parallelizer.language.plan import Mesh
from parallelizer.proof import runs
from parallelizer.proof.modes import Float64, PlainAttention
from parallelizer.proof.observe import default_dtype, filled, on_a_mesh, rank_parts
from parallelizer.proof.recording import local_part
from parallelizer.proof.slices import above_one, summed_over
from parallelizer.proof.subject import Subject
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.step import forward
from parallelizer.styles.application import Program
from parallelizer.torch_private import TorchDispatchMode, tree_leaves

SAME = 1e-9
"""What two values differ by, relative to the largest, that are the same but for rounding in float64."""

Visits = list[tuple[Span, list[torch.Tensor]]]
"""Lines in order of execution, each with what its operators computed in floating-point numbers, flat."""


def departure(subject: Subject, program: Program, seed: int = 0) -> Span | None:
    """The line, in float64. None where no such line is found, as in a model without a line of the user's; for compiled code and
    pipelines, which do not run line by line; and with float8, which rounds every result. Starts the ranks of the subject's mesh.
    """
    if program.of_slot("compile") or program.of_slot("precision") or subject.mesh.sizes["pp"] > 1:
        return None
    try:
        [whole] = in_children([(_unsharded, subject, seed)])
        if not whole:
            return None
        ranks = runs.from_ranks(functools.partial(_sharded, subject, program, seed), subject)
    except (LaunchError, PlanError, WorldError):  # the proof has failed in any case
        return None
    found = first_departure(whole, ranks, subject.mesh)
    return None if found is None else _whole_line(found)


def first_departure(whole: Visits, ranks: Sequence[Visits], mesh: Mesh) -> Span | None:
    """The first line whose result on the ranks is no part of the whole. Lines that ranks do not run are passed over, and so is
    what they run more often: hooks run on the line that calls a module.
    """
    places = [0] * len(ranks)
    for line, results in whole:
        here = [
            next((at for at in range(place, len(visits)) if visits[at][0] == line), None)
            for place, visits in zip(places, ranks, strict=True)
        ]
        if any(at is None for at in here):
            continue
        mine = [visits[at][1] for at, visits in zip(here, ranks, strict=True) if at is not None]
        places = [at + 1 for at in here if at is not None]
        if not _is_part(results[-1], mine, mesh):
            return line
    return None


def _is_part(whole: torch.Tensor, mine: Sequence[Sequence[torch.Tensor]], mesh: Mesh) -> bool:
    """Whether the whole has all values of a result of every rank, or all sums of their last results over an axis. A style that
    runs on the line may compute more behind the result, as context parallelism does.
    """
    values = whole[whole.isfinite()].sort().values
    if all(_any_stands_in(results, values) for results in mine):
        return True
    last = [results[-1] for results in mine]
    sums = (summed_over(last, mesh, axis) for axis in above_one(mesh))
    return any(all(one is not None and _any_stands_in([one], values) for one in each) for each in sums)


def _any_stands_in(results: Sequence[torch.Tensor], values: torch.Tensor) -> bool:
    """Whether each number of one of the results is among the sorted values. Zeros say nothing: masks and padding have them."""
    numbers = [one[one.isfinite() & (one != 0)] for one in results]
    some = [one for one in reversed(numbers) if len(one)]
    return not some or any(_stands_in(one, values) for one in some)


def _stands_in(numbers: torch.Tensor, values: torch.Tensor) -> bool:
    if not len(values):
        return False
    above = torch.searchsorted(values, numbers).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    nearest = torch.minimum((values[above] - numbers).abs(), (values[below] - numbers).abs())
    return bool((nearest <= SAME * values.abs().max()).all())


class _Results(TorchDispatchMode):
    """Keeps the results of each visit of a line of the user's code. `caller` is the file that starts the run: what it calls is
    looked at, and not who called it.
    """

    def __init__(self, caller: str) -> None:
        super().__init__()
        self.caller = caller
        self.visits: Visits = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        span = written_here(within=self.caller) if made else None
        if span is not None:
            line = Span(span.file, span.line)
            if not self.visits or self.visits[-1][0] != line:
                self.visits.append((line, []))
            flat = [local_part(one.detach()).double().flatten().cpu() for one in made]
            self.visits[-1][1].append(torch.cat(flat))
        return result


def _whole_line(span: Span) -> Span:
    """The span of what is written on the line."""
    text = linecache.getline(span.file, span.line).rstrip()
    return Span(span.file, span.line, len(text) - len(text.lstrip()) + 1, len(text) + 1)


def _unsharded(subject: Subject, seed: int) -> Visits:
    with Float64(), PlainAttention(), default_dtype(torch.float64):
        model = filled(subject, seed, torch.float64)
        batch = rank_parts(subject.batch(seed), subject, subject.accumulate, None)[0]
        with torch.no_grad(), _Results(children.__file__) as seen:
            forward(model, batch)
    return seen.visits


def _sharded(subject: Subject, program: Program, seed: int) -> Visits:
    with Float64(), default_dtype(torch.float64):
        model, mesh = on_a_mesh(subject, program, seed, torch.float64)
        batch = rank_parts(subject.batch(seed), subject, subject.accumulate, mesh)[0]
        with torch.no_grad(), _Results(runs.__file__) as seen:
            forward(model, batch)
    return seen.visits
