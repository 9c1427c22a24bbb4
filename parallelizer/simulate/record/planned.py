"""A real step against the dry run: what a step was planned to send and to hold, and what one was seen to.

The dry run records its step when optimizer states exist and gradients of the step before are there to be freed. The
first step of a run has neither, so that `Planned` knows the peak of such a step too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer import torch_private
from parallelizer.compiler.observe.running_module import Running, within
from parallelizer.simulate.record.ledger import Collective, Ledger
from parallelizer.simulate.record.memory import Usage
from parallelizer.simulate.record.trace import Recipe, Trace, trace
from parallelizer.styles.application import Program
from parallelizer.styles.compiled_forward import compiled_modules, seen_from_outside

Key = tuple[str, str, str]
"""Phase, axis and kind of a collective."""


@dataclass(frozen=True)
class Planned:
    """What the dry run says of one rank's step: its collectives in order, the peak of its memory in bytes, and that of
    a step which begins without optimizer states.
    """

    ledger: tuple[Collective, ...]
    peak: int
    first_peak: int


@dataclass(frozen=True)
class CountMismatch:
    """So many collectives were `planned` and so many `counted`; the one at which the two orders first part, if it is
    known, is of `module`, by `rule` (key, file, line).
    """

    phase: str
    axis: str
    kind: str
    planned: int
    counted: int
    module: str | None = None
    rule: tuple[str, str, int] | None = None

    def __str__(self) -> str:
        text = f"{self.axis} {self.kind} in {self.phase}: {self.planned:,} planned, {self.counted:,} counted"
        if self.module is not None:
            text += f"; the first of them in {self.module or 'the root module'}"
        if self.rule is not None:
            key, file, line = self.rule
            text += f" ({file}:{line}: `{key}`)" if key else f" ({file}:{line})"
        return text


def plan_step(program: Program, model: nn.Module, recipe: Recipe, rank: int = 0) -> Planned:
    """Trace one step as `rank`, in children of this process: see `trace`. Raises PlanError when it cannot be traced."""
    return planned_of(trace(program, model, recipe, rank))


def planned_of(step: Trace) -> Planned:
    """What a traced step says of the real one."""
    return Planned(step.ledger, step.memory.peak, first_peak(step.memory))


def first_peak(memory: Usage) -> int:
    """The peak in bytes of a step that begins without optimizer states and without gradients of a step before it."""
    behind = False
    highest = 0
    for point in memory.course:
        behind = behind or point.phase not in ("", "optimizer")
        absent = 0 if point.phase == "optimizer" else point.by_category["optimizer"]
        if not behind:
            absent += point.by_category["gradients"]
        highest = max(highest, point.total - absent)
    return highest


class Observed(Ledger):
    """Collectives of a real step, counted while it is active. It changes nothing of the model's own, as `Ledger.label`
    would, so that FSDP's are not told apart by their units. What it cannot tell of goes into `failure`, not through the
    step. A collective inside a compiled module is recorded as one of that module: see `seen_from_outside`.
    """

    def __init__(self, program: Program, mesh: DeviceMesh, model: nn.Module) -> None:
        super().__init__(program, mesh, Running(model, seen_from_outside(model)))
        self.model = model
        self.compiled = compiled_modules(model)
        self.failure: str | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile would otherwise run as plain operations what it compiles under a mode."""
        return True

    def _unknown(self, operator: str) -> None:
        self.failure = self.failure or f"the collective {operator} is not known"

    def _record(self, kind: str, args: Any, kwargs: Any, result: Any, *, plain: bool = False) -> None:
        try:
            super()._record(kind, args, kwargs, result)
        except Exception as error:  # the step is a user's training
            self.failure = self.failure or f"{type(error).__name__}: {error}"


@contextmanager
def observing(
    program: Program, mesh: DeviceMesh, model: nn.Module, *, active: bool = True
) -> Iterator[Observed]:
    """Count the collectives of a step inside, if it is `active`. All ranks must come here, or none: a group may still
    have to be made.
    """
    observed = Observed(program, mesh, model)
    try:
        with observed if active else nullcontext():
            yield observed
    finally:
        observed.running.remove()


def of_the_step(entries: Iterable[Collective]) -> list[Collective]:
    """Those within a phase of the step: `train_step(skip_nonfinite=True)` asks between them whether all ranks have
    finite numbers, which is no part of what is planned.
    """
    return [e for e in entries if e.phase]


def outside_compiled(entries: Iterable[Collective], compiled: Sequence[str]) -> list[Collective]:
    """The collectives of modules inside `compiled` ones as those of the compiled modules, as `Observed` records them."""
    return [
        replace(e, module=next((path for path in compiled if within(e.module, path)), e.module))
        for e in entries
    ]


def differences(planned: Sequence[Collective], counted: Sequence[Collective]) -> list[CountMismatch]:
    """By phase, axis and kind, where the numbers of collectives are not equal."""
    was, now = _counts(planned), _counts(counted)
    keys = [*was, *(k for k in now if k not in was)]
    return [_difference(key, planned, counted, was[key], now[key]) for key in keys if was[key] != now[key]]


def _difference(
    key: Key, planned: Sequence[Collective], counted: Sequence[Collective], was: int, now: int
) -> CountMismatch:
    ours, theirs = [e for e in planned if _key(e) == key], [e for e in counted if _key(e) == key]
    modules = Counter(e.module for e in theirs)
    # FSDP's are seen in the module that runs, and planned for the unit: only what is planned elsewhere is told.
    for entry in ours if was > now else ():
        if modules[entry.module] == 0:
            return CountMismatch(*key, was, now, entry.module, entry.rule)
        modules[entry.module] -= 1
    modules = Counter(e.module for e in ours)
    for entry in theirs if now > was else ():
        if modules[entry.module] == 0:
            # A real step does not tell FSDP's units apart: what is planned of the kind names a rule.
            rule = entry.rule or next((e.rule for e in ours if e.rule is not None), None)
            return CountMismatch(*key, was, now, entry.module, rule)
        modules[entry.module] -= 1
    return CountMismatch(*key, was, now)


def _counts(entries: Iterable[Collective]) -> Counter[Key]:
    return Counter(map(_key, entries))


def _key(entry: Collective) -> Key:
    return entry.phase, entry.axis, entry.kind


def held(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the storages behind tensors, each once, of a DTensor its local part."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch_private.Elementless):
            continue
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())
