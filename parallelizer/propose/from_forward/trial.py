"""A proposed plan tried as anybody's would be: compiled, followed, and proven, within a time."""

from __future__ import annotations

import dataclasses
import linecache
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import nn

from parallelizer.child.children import WorldError
from parallelizer.child.in_time import Failed, NotInTime, in_time
from parallelizer.configuration.setup import Setup
from parallelizer.configuration.validate import validated
from parallelizer.diagnostics.diagnostic import HERE, Diagnostic, PlanError
from parallelizer.language.load import load_plan
from parallelizer.language.plan import EXPERT, TENSOR_AXES, Mesh
from parallelizer.propose.from_forward.in_place import changed_in_place
from parallelizer.simulate.checks.does_not_run import FAILS_HERE
from parallelizer.simulate.checks.sharded_logits import THE_LOSS

_OF_THE_MODEL = ("model-failed", "no-initializer")
"""Codes that say that the unsharded model cannot be run, whatever the plan."""

_OF_A_LINE = ("local-positions", "needs-whole")
"""Codes whose help says what to write at a line of the model."""

T = TypeVar("T")


@dataclass
class Deadline:
    """When to stop trying: `seconds` after `began`. `reached` says that something was not done in time."""

    seconds: float
    began: float = dataclasses.field(default_factory=time.monotonic)
    reached: bool = False

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.began + self.seconds - time.monotonic()

    def within(self, function: Callable[[], T], share: float = 1.0) -> T:
        """What a function returns in a child, given a share of what is left. Raises NotInTime and Failed."""
        try:
            if self.left <= 0:
                raise NotInTime(f"{self.seconds:g} s are over")
            return in_time(function, self.left * share)
        except NotInTime:
            self.reached = True
            raise


@dataclass(frozen=True)
class _Tried:
    refusal: str | None = None
    unproven: str | None = None
    drawn: tuple[str, ...] = ()


class Trials:
    """Plans for one configuration, tried on small meshes until a deadline."""

    def __init__(
        self,
        setup: Setup,
        model: nn.Module,
        deadline: Deadline | None = None,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.setup, self.model = setup, model
        self.deadline, self.tell = deadline or Deadline(3600), tell
        self.unproven: str | None = None  # why the unsharded model itself cannot be compared with
        self.said: dict[tuple[str, tuple[tuple[str, int], ...], bool], str | None] = {}
        self.draws: dict[str, tuple[str, ...]] = {}

    def refusal(self, text: str, mesh: Mapping[str, int], *, proven: bool = False) -> str | None:
        """Why the checks refuse a plan on a mesh, or what is wrong with its run if `proven`, in one sentence; None where nothing
        is. Raises NotInTime.
        """
        key = (text, tuple(sorted(mesh.items())), proven)
        if key not in self.said:
            began = time.monotonic()
            what = f"{'running' if proven else 'following'} a step on {meshed(mesh)}"
            try:
                tried = self.deadline.within(lambda: self._tried(text, mesh, proven))
            except NotInTime:
                self.tell(f"{what}: not done in time")
                raise
            except Failed as error:
                tried = _Tried(unproven=str(error)) if proven else _Tried(str(error))
            self.unproven = tried.unproven or self.unproven
            holds = "cannot be compared" if tried.unproven else "refused" if tried.refusal else "holds"
            self.tell(f"{what}: {holds} ({time.monotonic() - began:.0f} s)")
            self.said[key] = tried.refusal
            if not proven:
                self.draws[text] = tried.drawn
        return self.said[key]

    def drawn(self, text: str) -> tuple[str, ...]:
        """The modules that draw equal random numbers for other parts on each rank, under a plan that was tried last."""
        return self.draws.get(text, ())

    def _tried(self, text: str, mesh: Mapping[str, int], proven: bool) -> _Tried:
        with tempfile.TemporaryDirectory(prefix="parallelizer-") as folder:
            path = Path(folder) / "plan.yaml"
            path.write_text(text)
            try:
                setup = dataclasses.replace(self.setup, plan=load_plan(path), mesh=_mesh(mesh))
                return _Tried(self._proof(setup)) if proven else self._check(setup)
            except PlanError as error:
                if proven and (first := error.diagnostics[0]).code in _OF_THE_MODEL:
                    return _Tried(unproven=": ".join(filter(None, (first.message, first.help))))
                return _Tried(_sentence(error.diagnostics))
            except WorldError as error:
                reason = str(error).strip().splitlines()[-1]
                return _Tried(unproven=reason) if proven else _Tried(reason)

    def _check(self, setup: Setup) -> _Tried:
        validation = validated(setup, setup.compile(self.model), self.model)
        flow = validation.flow
        draws = (d for d in flow.draws if d.axis in TENSOR_AXES) if flow is not None else ()
        drawn = tuple(dict.fromkeys(path for d in draws for path in flow.paths(d.module))) if flow else ()
        errors = {d.code for d in validation.found if d.severity == "error"}
        # Of sizes these checks are not sure (a dimension of one group of heads may be taken for features): the proof knows.
        wrong = None if errors and errors <= {"fused-features", "other-size"} else _sentence(validation.found)
        return _Tried(wrong, drawn=drawn)

    def _proof(self, setup: Setup) -> str | None:
        from parallelizer.proof.prove import prove
        from parallelizer.runtime.launch.failures import LaunchError

        try:
            proof = prove(setup)
        except LaunchError as error:
            return error.message.strip().splitlines()[-1]
        if proof.passed:
            return None
        if proof.divergence is not None:
            return f"the sharded run differs from the unsharded one: {proof.divergence.description}"
        return "the sharded run differs from the unsharded one"


def _mesh(sizes: Mapping[str, int]) -> Mesh:
    return Mesh({axis: size for axis, size in sizes.items() if axis != EXPERT}, ep=sizes.get(EXPERT, 1))


def meshed(mesh: Mapping[str, int]) -> str:
    """A mesh in words: `dp_shard=2 x tp=2`."""
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items())


def _sentence(found: tuple[Diagnostic, ...]) -> str | None:
    """The first error."""
    first = next((d for d in found if d.severity == "error"), None)
    if first is None:
        return None
    said = changed_in_place(first)
    if said is None:
        edit = f"; {first.help}" if first.help and first.code in _OF_A_LINE else ""
        said = f"{first.message}{_at_line(first)}{edit}"
    return f"{said} [{first.code}]"


def _at_line(found: Diagnostic) -> str:
    """The line of the user's code that a refusal is about, where it is about one."""
    label = {"does-not-run": FAILS_HERE, "sharded-logits": THE_LOSS}.get(found.code, HERE)
    at = next((related.span for related in found.related if related.label == label), None)
    if at is None:
        return ""
    place = at.file if len(at.file) < 40 else Path(at.file).name
    line = linecache.getline(at.file, at.line).strip()
    return f", at {place}:{at.line}" + (f": `{line}`" if line else "")
