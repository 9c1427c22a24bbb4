"""Values under which a forward decides otherwise than under those of a proof's steps.

A branch on a norm above a limit, or on the largest feature, is taken for values of some sizes only. Ranks that see a part of the
values go another way than the whole model right where the branch turns over: as values grow, one of them is above the limit
first. So a child process runs the unsharded model with values of several sizes, and with rows of other lengths, looks for
what the forward decides otherwise, and closes in on the size where it does. The proof runs a step on each of these scenes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from parallelizer.child.children import WorldError, in_children
from parallelizer.diagnostics.diagnostic import PlanError, Span
from parallelizer.proof.decisions import Decisions
from parallelizer.proof.modes import Float64, PlainAttention
from parallelizer.proof.observe import default_dtype, filled
from parallelizer.proof.scene import Scene
from parallelizer.proof.subject import Subject
from parallelizer.runtime.loss_sums import loss_sums
from parallelizer.runtime.step import forward

SCALES = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)
"""The sizes of values that are tried, as multiples of the initial ones."""

MOST = 6
"""Scenes that a proof runs at most."""

HALVINGS = 12
"""A size where a branch turns over is found to within 4 ** (1 / 2 ** HALVINGS), a share of 3e-4."""


@dataclass(frozen=True)
class _Executed:
    """What a forward and a loss did in a scene: operators with their lines, and which sides decisions took."""

    operators: tuple[tuple[str, Span | None], ...]
    sides: Mapping[tuple[Span, str], frozenset[bool]]
    reads: bool

    def alike(self, other: _Executed) -> bool:
        """Whether both did the same operators, whatever their values."""
        return [name for name, _ in self.operators] == [name for name, _ in other.operators]

    def parting(self, other: _Executed) -> Span | None:
        """The line where two courses part: the last one that decided before they did."""
        line = None
        for (name, at), (theirs, _) in zip(self.operators, other.operators, strict=False):
            if name != theirs:
                break
            line = Span(at.file, at.line) if at is not None and name in _READS else line
        return line


_READS = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.nonzero.default")
"""What brings values to the host, where they choose a course."""


def scenes_of(subject: Subject, seed: int = 0) -> tuple[Scene, ...]:
    """The scenes that a proof of a subject runs besides its steps. None where the forward decides nothing by values."""
    try:
        (found,) = in_children([(scenes_in_here, subject, seed)])
    except (WorldError, PlanError):
        return ()
    scenes: tuple[Scene, ...] = found
    return scenes


def scenes_in_here(subject: Subject, seed: int) -> tuple[Scene, ...]:
    """As `scenes_of`, in this process."""
    with default_dtype(torch.float64), Float64(), PlainAttention():  # in which the proof draws values too
        return _chosen(_Stage(subject, seed), subject.loud)


def _chosen(stage: _Stage, loud: float) -> tuple[Scene, ...]:
    base = stage.course(Scene(1.0))
    if base is None or not (base.reads or base.sides):
        return ()
    taken = {key: set(sides) for key, sides in base.sides.items()}
    if (louder := stage.course(Scene(loud))) is not None:
        _add(taken, louder)
    chosen: list[Scene] = []
    for scene in (*_turning(stage, False), *_turning(stage, True), Scene(1.0, uneven=True)):
        if (course := stage.course(scene)) is not None:
            _add(taken, course)
            chosen.append(scene)
    for scene in [Scene(s, u) for s in sorted(SCALES, key=lambda s: abs(math.log(s))) for u in (False, True)]:
        course = stage.course(scene) if len(chosen) < MOST else None
        if course is not None and _add(taken, course):
            chosen.append(scene)
    return tuple(chosen)


def _turning(stage: _Stage, uneven: bool) -> list[Scene]:
    """The scenes on both sides of the size nearest to that of the initial values where the forward changes its course."""
    found: list[tuple[float, list[Scene]]] = []
    known = [(s, course) for s in SCALES if (course := stage.course(Scene(s, uneven, uneven))) is not None]
    for (low, below), (high, above) in itertools.pairwise(known):
        if below.alike(above):
            continue
        first, second = (low, below), (high, above)
        for _ in range(HALVINGS):
            middle = math.sqrt(first[0] * second[0])
            course = stage.course(Scene(middle, uneven, uneven))
            if course is None:
                break
            if course.alike(first[1]):
                first = middle, course
            else:
                second = middle, course
        line = first[1].parting(second[1])
        found.append(
            (
                abs(math.log(second[0])),
                [Scene(scale, uneven, uneven, line) for scale in (second[0], first[0])],
            )
        )
    return min(found, key=lambda pair: pair[0])[1] if found else []


def _add(taken: dict[tuple[Span, str], set[bool]], course: _Executed) -> bool:
    """Note the sides that a course took; whether there is a new one."""
    new = False
    for key, sides in course.sides.items():
        before = taken.setdefault(key, set())
        new |= bool(before) and not before >= sides
        before |= sides
    return new


class _Stage:
    """A model in its own process, which runs its forward and its loss with other values."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.subject, self.model = subject, filled(subject, seed, torch.float64)
        self.batch = {k: v.double() if v.is_floating_point() else v for k, v in subject.batch(seed).items()}
        self.start = [(p, p.detach().clone()) for p in self.model.parameters()]
        self.buffers = [(b, b.detach().clone()) for b in self.model.buffers()]
        self.courses: dict[Scene, _Executed | None] = {}

    def course(self, scene: Scene) -> _Executed | None:
        """What is done in a scene; None where it fails, or gives no finite loss."""
        if scene not in self.courses:
            self.courses[scene] = self._run(scene)
        return self.courses[scene]

    @torch.no_grad()
    def _run(self, scene: Scene) -> _Executed | None:
        for param, value in self.start:
            param.copy_(value * scene.scale)
        for buffer, value in self.buffers:
            buffer.copy_(value)
        batch = scene.batch(self.batch, self.subject.workload, self.subject.rows)
        try:
            with Decisions(__file__, operators=True) as taken:
                total, weight = loss_sums(self.subject.loss, forward(self.model, batch), batch)
        except Exception:  # whatever a forward raises for values that it never has
            return None
        if not math.isfinite(float(total) / (float(weight) or math.nan)):
            return None
        reads = any(name in _READS for name, _ in taken.operators)
        return _Executed(tuple(taken.operators), taken.sides(), reads)
