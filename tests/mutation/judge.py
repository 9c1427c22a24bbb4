"""What `validate` says of a mutant, and whether it does harm: whether a proof finds another loss, gradient or update,
or ranks that do not run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import parallelizer
from parallelizer.child.children import WorldError
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.configuration.validate import validated
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, has_errors
from parallelizer.language.load import load_plan
from parallelizer.proof import runs as proof_runs
from parallelizer.proof.prove import prove_with
from parallelizer.proof.runs import References, references_of
from parallelizer.proof.tiny import subject_of
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.styles.application import Program
from tests.mutation.generate import Mutant

PATIENCE = 15.0
"""Seconds until ranks that wait for each other are taken to wait for ever."""


@dataclass(frozen=True)
class Harm:
    """What a mutant does: `wrong` says what, empty for nothing. `how` it is known: `text` (it is no program),
    `program` (it compiles to the same), or `proof`.
    """

    wrong: str
    how: str


@dataclass(frozen=True)
class Verdict:
    """A mutant's findings, as (code, severity, line), and its harm."""

    mutant: Mutant
    found: tuple[tuple[str, str, int | None], ...]
    harm: Harm

    @property
    def refused(self) -> bool:
        return any(severity == "error" for _, severity, _ in self.found)

    @property
    def harmful(self) -> bool:
        return bool(self.harm.wrong)

    @property
    def codes(self) -> list[str]:
        """The codes of its errors."""
        return sorted({code for code, severity, _ in self.found if severity == "error"})


class Judge:
    """Judges mutants of plans, one after the other.

    What was found is kept in the folder `cache`: of `validate` for as long as the sources stay as they are, of
    proofs for as long as the mutant does.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self.cache = cache
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)

    def judge(self, mutant: Mutant, original: str) -> Verdict:
        """`original` is the text of the plan that the mutant was made of."""
        known = self.known(mutant)
        if known is not None:
            return known
        with tempfile.TemporaryDirectory(prefix="parallelizer-") as folder:
            verdict = self._judge(mutant, original, folder)
        self._keep(f"{_key(mutant)}-{_product()}", {"found": verdict.found, "harm": asdict(verdict.harm)})
        return verdict

    def known(self, mutant: Mutant) -> Verdict | None:
        """What was kept of the mutant, with the sources as they are now."""
        kept = self._kept(f"{_key(mutant)}-{_product()}")
        if kept is None:
            return None
        found = tuple((code, severity, line) for code, severity, line in kept["found"])
        return Verdict(mutant, found, Harm(**kept["harm"]))

    def _judge(self, mutant: Mutant, original: str, folder: str) -> Verdict:
        try:
            setup = _with_plan(mutant, mutant.text, folder)
            program = setup.compile(setup.build_model(), force=True)
        except PlanError as error:
            wrong = f"no program: {error.diagnostics[0].message}"
            return Verdict(mutant, _plain(error.diagnostics), Harm(wrong, "text"))
        found = program.diagnostics
        if not has_errors(found):
            found = validated(setup, program, setup.build_model()).found
        same = mutant.text != original and _facts(program) == _facts(_program(mutant, original))
        harm = Harm("", "program") if same else self._proven(mutant, setup)
        return Verdict(mutant, _plain(found), harm)

    def _proven(self, mutant: Mutant, setup: Setup) -> Harm:
        kept = self._kept(_key(mutant))
        if kept is not None:
            return Harm(**kept)
        harm = Harm(_wrong(setup, _references(mutant)), "proof")
        self._keep(_key(mutant), asdict(harm))
        return harm

    def _kept(self, name: str) -> Any:
        path = self.cache / f"{name}.json" if self.cache else None
        return json.loads(path.read_text()) if path and path.exists() else None

    def _keep(self, name: str, value: Any) -> None:
        if self.cache:
            (self.cache / f"{name}.json").write_text(json.dumps(value))


def _key(mutant: Mutant) -> str:
    parts = repr((mutant.text, mutant.preset, mutant.overrides, mutant.preset_text))
    return hashlib.sha256(parts.encode()).hexdigest()[:24]


@functools.cache
def _product() -> str:
    """A digest of the sources that `validate` runs: what it says is only as good as they are."""
    digest = hashlib.sha256()
    for path in sorted(Path(parallelizer.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _wrong(setup: Setup, references: References) -> str:
    """What is wrong with a run of the plan, in a few words; nothing if it equals the unsharded one."""
    before = proof_runs.COLLECTIVE_TIMEOUT
    proof_runs.COLLECTIVE_TIMEOUT = PATIENCE
    try:
        proof = prove_with(subject_of(setup), references, force=True)
    except PlanError as error:  # a module's forward failed on a rank
        return f"does not run: {error.diagnostics[0].message}"
    except (LaunchError, WorldError) as error:
        return f"does not run: {_last_line(error)}"
    finally:
        proof_runs.COLLECTIVE_TIMEOUT = before
    if proof.passed:
        return ""
    worst = proof.verdict.worst(1)
    what = f"{worst[0].what} {worst[0].name}".strip() + f" off by {worst[0].error:.1e}"
    return what if worst and not worst[0].passed else f"ranks differ in {', '.join(proof.unequal[:2])}"


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[0] if lines else "")[:160]


def _plain(found: tuple[Diagnostic, ...] | list[Diagnostic]) -> tuple[tuple[str, str, int | None], ...]:
    return tuple((d.code, d.severity, d.span.line if d.span else None) for d in found)


def _facts(program: Program) -> Any:
    """All that two programs that do the same have in common."""
    applications = [
        (a.module, a.slot, a.style, a.axes, _shown(a.options), _shown(a.params), str(a.divided))
        for a in program
    ]
    buffers = {**program.plan.batch, **{f"model {n}": b for n, b in program.plan.buffers.items()}}
    return program.mesh.sizes, sorted(applications), {n: (b.dim, b.make) for n, b in buffers.items()}


def _shown(value: Any) -> str:
    """A value without the places where it was written."""
    if isinstance(value, Mapping):
        return str(sorted((str(k), _shown(v)) for k, v in value.items()))
    return str(value)


@functools.cache
def _composed(overrides: tuple[str, ...], preset: str, preset_text: str) -> Setup:
    with tempfile.TemporaryDirectory(prefix="parallelizer-") as folder:
        if preset_text:
            (Path(folder) / "parallel").mkdir()
            (Path(folder) / "parallel" / "mutant.yaml").write_text(preset_text)
            preset = "mutant"
        return from_config(*compose_config([*overrides, f"parallel={preset}"], folder))


def _with_plan(mutant: Mutant, text: str, folder: str) -> Setup:
    """The mutant's configuration with a plan of this text."""
    path = Path(folder) / f"{mutant.plan}.yaml"
    path.write_text(text)
    setup = _composed(mutant.overrides, mutant.preset, mutant.preset_text)
    return dataclasses.replace(setup, plan=load_plan(os.fspath(path)))


@functools.cache
def _program_of(plan: str, text: str, preset: str, overrides: tuple[str, ...]) -> Program:
    mutant = Mutant(plan, "", "", text, None, preset, overrides)
    with tempfile.TemporaryDirectory(prefix="parallelizer-") as folder:
        setup = _with_plan(mutant, text, folder)
        return setup.compile(setup.build_model(), force=True)


def _program(mutant: Mutant, original: str) -> Program:
    return _program_of(mutant.plan, original, mutant.preset, mutant.overrides)


@functools.cache
def _references_for(overrides: tuple[str, ...], preset: str) -> References:
    return references_of(subject_of(_composed(overrides, preset, "")))


def _references(mutant: Mutant) -> References:
    """The unsharded runs: of the model and its batches, whatever the mesh."""
    model = tuple(o for o in mutant.overrides if "parallel.mesh" not in o)
    return _references_for(model, "single")
