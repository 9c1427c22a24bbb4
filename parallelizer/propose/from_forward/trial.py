"""A proposed plan tried as anybody's would be: compiled, followed, and proven."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from parallelizer.child import WorldError
from parallelizer.configuration.setup import Setup
from parallelizer.configuration.validate import validated
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.load import load_plan
from parallelizer.language.plan import Mesh

_OF_THE_MODEL = ("model-failed", "no-initializer")
"""Codes that say that the unsharded model cannot be run, whatever the plan."""


class Trials:
    """Plans for one configuration, tried on small meshes."""

    def __init__(self, setup: Setup, model: nn.Module) -> None:
        self.setup, self.model = setup, model
        self.unproven: str | None = None  # why the unsharded model itself cannot be compared with
        self.said: dict[tuple[str, tuple[tuple[str, int], ...], bool], str | None] = {}

    def refusal(self, text: str, mesh: Mapping[str, int], *, proven: bool = False) -> str | None:
        """Why the checks refuse a plan on a mesh, or what is wrong with its run if `proven`, in one sentence; None where nothing
        is.
        """
        key = (text, tuple(sorted(mesh.items())), proven)
        if key not in self.said:
            self.said[key] = self._refusal(text, mesh, proven)
        return self.said[key]

    def _refusal(self, text: str, mesh: Mapping[str, int], proven: bool) -> str | None:
        with tempfile.TemporaryDirectory(prefix="parallelizer-") as folder:
            path = Path(folder) / "plan.yaml"
            path.write_text(text)
            try:
                setup = dataclasses.replace(self.setup, plan=load_plan(path), mesh=Mesh(dict(mesh)))
                return self._proof(setup) if proven else self._check(setup)
            except PlanError as error:
                if proven and error.diagnostics[0].code in _OF_THE_MODEL:
                    self.unproven = error.diagnostics[0].message
                    return None
                return _sentence(error.diagnostics)
            except WorldError as error:
                if proven:
                    self.unproven = str(error).strip().splitlines()[-1]
                    return None
                return str(error).strip().splitlines()[-1]

    def _check(self, setup: Setup) -> str | None:
        return _sentence(validated(setup, setup.compile(self.model), self.model).found)

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


def _sentence(found: tuple[Diagnostic, ...]) -> str | None:
    """The first error."""
    first = next((d for d in found if d.severity == "error"), None)
    return None if first is None else f"{first.message} [{first.code}]"
