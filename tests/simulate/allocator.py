"""What the CPU allocator really hands out in a training step: real tensors on a rank whose peers do not
exist.

The world is PyTorch's fake process group, as in the dry run, but nothing else is: parameters, activations and
kernels are real, and torch's profiler notes every allocation. One thread, because kernels take scratch for
each.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from parallelizer import torch_private, train_step
from parallelizer.compiler.observe import phase as phases
from parallelizer.mesh import build_mesh
from parallelizer.runtime.apply import apply
from parallelizer.runtime.initialize import allocate
from parallelizer.simulate.fake_world import enter_fake_world
from parallelizer.simulate.record.memory import Usage
from parallelizer.simulate.record.pipeline_step import prepare
from parallelizer.simulate.record.trace import Recipe, local_parts, microbatch_and_forms
from parallelizer.styles.application import Program

BEGINNING = 12_347
"""Bytes of an allocation that marks where the second step begins; the phases' marks are the next odd
numbers.
"""
MARKS = {BEGINNING + 2 * (i + 1): name for i, name in enumerate(("", *phases.PHASES))}


def measured_peaks(program: Program, model: nn.Module, recipe: Recipe, rank: int) -> dict[str, int]:
    """The highest number of bytes in use in each phase of the second step, and `peak` of all of it.

    Enters a fake world for good and uses the model, which is on meta, up: only in a child. Bytes are those of
    tensors allocated from parameters on; what the process had before does not count.
    """
    enter_fake_world(program.mesh.world_size, rank)
    mesh = build_mesh(program.mesh, "cpu")
    microbatch, forms = microbatch_and_forms(
        program, model, mesh, recipe.workload, torch_private.FakeTensors()
    )
    apply(program, model, mesh)
    prepare(model, forms, microbatch)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        allocate(model, "cpu")
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                local.fill_(0.01)
        optimizer = recipe.optimizer(model)
        parts = local_parts(recipe.workload, program, mesh)
        train_step(model, parts, recipe.loss, optimizer, recipe.clip)
        gc.collect()  # cycles would be freed at one moment or another
        torch.empty(BEGINNING, dtype=torch.uint8)
        with _marked_phases():
            train_step(model, parts, recipe.loss, optimizer, recipe.clip)
    return _peaks(_allocations(profiler))


def predicted_peaks(usage: Usage) -> dict[str, int]:
    """The same of a traced step."""
    peaks = {"peak": usage.peak}
    for point in usage.course:
        name = point.phase or "between"
        peaks[name] = max(peaks.get(name, 0), point.total)
    return peaks


def _allocations(profiler: Any) -> list[int]:
    """Every change of the memory in use, in bytes, in order."""
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def _peaks(changes: Sequence[int]) -> dict[str, int]:
    total, phase, peaks = 0, None, {}
    for change in changes:
        if abs(change) == BEGINNING:
            phase = "between"
        elif abs(change) in MARKS:
            phase = MARKS[abs(change)] or "between"
        else:
            total += change
            if phase is not None:
                peaks[phase] = max(peaks.get(phase, 0), total)
    return {**peaks, "peak": max(peaks.values())}


@contextmanager
def _marked_phases() -> Any:
    """While active, entering and leaving a phase is marked by an allocation of its own size."""
    from parallelizer.runtime import step

    sizes = {name: size for size, name in MARKS.items()}
    original = step.phase

    @contextmanager
    def marked(name: str) -> Any:
        before = phases.current()
        torch.empty(sizes[name], dtype=torch.uint8)
        with original(name):
            yield
        torch.empty(sizes[before], dtype=torch.uint8)

    step.phase = marked
    try:
        yield
    finally:
        step.phase = original


def differences(predicted: Mapping[str, int], measured: Mapping[str, int]) -> dict[str, int]:
    """Predicted less measured, by phase, where they are not equal."""
    names = [*measured, *(n for n in predicted if n not in measured)]
    return {n: d for n in names if (d := predicted.get(n, 0) - measured.get(n, 0))}
