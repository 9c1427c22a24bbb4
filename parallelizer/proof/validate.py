"""What is wrong with a setup, or with a model under a plan, the proof of a setup's tiny form included.

setup = pz.from_overrides(["model=llama_debug", "parallel=tp8_cp2"])
assert not [found for found in pz.validate(setup) if found.severity == "error"]
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from parallelizer.configuration.setup import Setup
from parallelizer.configuration.validate import validate as validate_unproven
from parallelizer.configuration.validate import validated
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, has_errors, in_order
from parallelizer.diagnostics.validated import Validated
from parallelizer.language.load import load_plan
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import Mesh, Plan, StyleDefaults
from parallelizer.language.workload import Workload
from parallelizer.proof.certificate import FOLDER, Found, find, missing, told
from parallelizer.proof.halves import unequal_halves
from parallelizer.proof.quick import prove_quickly, unproven_difference
from parallelizer.proof.subject import Subject
from parallelizer.proof.tiny import proof_batch
from parallelizer.proof.unsure import ASSERT, UNSURE, doubted, only_unsure, refused, settled

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.runtime.step import Loss
    from parallelizer.simulate.validate import Validation

SECONDS = 10.0
"""A proof that should take longer is left to `verify` and to the recipe."""

ROWS = 4
"""Rows of a batch that a model is run on without a proof."""

NOTHING = "one rank: nothing to prove"
"""What is known about the proof of a run of one rank."""


@dataclass(frozen=True)
class Looked:
    """What was found of a setup without running its ranks, and what is `known` of its proof."""

    validation: Validation
    known: Found

    @property
    def found(self) -> tuple[Diagnostic, ...]:
        """All findings. Errors that a proof may settle are notes where a certificate settles them."""
        found = self.validation.found
        return settled(found) if self.known.certificate is not None and only_unsure(found) else found

    @property
    def refused(self) -> bool:
        """Whether there are errors that no proof may settle."""
        return refused(self.found)

    @property
    def unsure(self) -> bool:
        """Whether there are errors, and a proof may settle all of them."""
        return only_unsure(self.found)


@dataclass(frozen=True)
class Checked:
    """What was found, and in a line what is known about the proof; empty where there are errors without it."""

    found: tuple[Diagnostic, ...]
    proof: str = ""


def validate(
    subject: Setup | nn.Module,
    plan: Plan | str | Path | None = None,
    mesh: Mesh | Mapping[str, int] | None = None,
    *,
    workload: Workload | None = None,
    loss: Loss | None = None,
    defaults: Mapping[str, StyleDefaults] | None = None,
    pipeline: Pipeline | None = None,
    prove: bool = True,
) -> Validated:
    """Every finding of `parallelizer validate`, errors, warnings and notes, about a setup, or a model under a plan on a
    mesh: notes, then warnings, then errors, each sorted by position.

    The tiny form of a setup without errors is then proven on CPU ranks, as `parallelizer verify` does, if that should take less
    than ten seconds and no certificate in `.parallelizer/proofs` shows it; `prove=False` leaves it out. A difference is an error
    `not-equal`. Without a proof, one process compares what halves of a batch compute with what the whole batch computes: data
    ranks must not differ.

    A model is looked at as it is, on meta or not, and left so; it is not proven (`parallelizer.testing.assert_equivalent` does
    that), and what a check is not sure of is a warning. A small one runs in this way on a batch of four rows. `plan` is a plan,
    its name or its path, `mesh` has the sizes of axes, `pipeline` the schedule of one with `pp`. `workload` lets batch,
    sequence and heads be checked; with `loss(output, batch)` too, one step is followed and one is traced on a fake world, which
    needs no ranks and finds what no file can tell. Without them these checks do not run: `unchecked` of the result says so, and
    so does its text, which `print` shows. The process forks for that: it must have no process group. One that has used CUDA
    starts new processes instead, for which the model and the loss must pickle. Raises ValueError for a model without a plan or
    a mesh.
    """
    if isinstance(subject, Setup) and prove:
        return _validated(check(subject).found)
    if isinstance(subject, Setup):
        return _validated(_unproven(subject))
    found = validate_unproven(
        subject, plan, mesh, workload=workload, loss=loss, defaults=defaults, pipeline=pipeline, unsure=UNSURE
    )
    found = doubted(found, ASSERT)
    wrong = None if has_errors(found) else _of_model(subject, plan, mesh, workload, loss)
    lacking = [f"`{name}`" for name, given in (("workload", workload), ("loss", loss)) if given is None]
    every = found if wrong is None else in_order((*found, wrong))
    return _validated(every, _without_step(lacking) if lacking else "")


def _validated(found: tuple[Diagnostic, ...], unchecked: str = "") -> Validated:
    """With the checks that did not run because the step itself failed to."""
    stopped = any(one.code == "trace-failed" for one in found)
    return Validated(found, "the step did not run, so its checks were skipped" if stopped else unchecked)


def _without_step(lacking: Sequence[str]) -> str:
    """What is not known about a model for which `validate` got no workload or no loss."""
    return (
        f"`validate` needs {' and '.join(lacking)} to check a step: a norm without a rule, a fused projection without `packed` "
        "and a loss that is a mean were not looked for"
    )


def _unproven(setup: Setup) -> tuple[Diagnostic, ...]:
    """The findings about a setup of which no proof is made."""
    try:
        model = setup.build_model()
        found = doubted(validated(setup, setup.compile(model, unsure=UNSURE), model).found)
    except PlanError as error:
        return error.diagnostics
    if has_errors(found) or setup.mesh.world_size == 1:
        return found
    wrong = unproven_difference(setup)
    return found if wrong is None else in_order((*found, wrong))


def _of_model(
    model: nn.Module,
    plan: Plan | str | Path | None,
    mesh: Mesh | Mapping[str, int] | None,
    workload: Workload | None,
    loss: Loss | None,
) -> Diagnostic | None:
    """What a model shows without ranks, on a batch of four rows of the workload."""
    if workload is None or loss is None or plan is None or mesh is None:
        return None
    work = dataclasses.replace(workload, batch_size=ROWS, accumulate=1)
    subject = Subject(
        plan=plan if isinstance(plan, Plan) else load_plan(str(plan)),
        mesh=mesh if isinstance(mesh, Mesh) else Mesh(mesh),
        build=functools.partial(copy.deepcopy, model),
        loss=loss,
        optimizer=_adamw,
        batch=functools.partial(proof_batch, work),
        rows=ROWS,
        seq_len=work.seq_len,
        workload=work,
    )
    return unequal_halves(subject) if subject.mesh.world_size > 1 else None


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def look(setup: Setup, model: nn.Module, validation: Validation, proofs: Path) -> Looked:
    """Look in the folder `proofs` for the certificate of a setup that was validated."""
    if refused(validation.found):
        return Looked(validation, Found({}))  # what cannot run has no fingerprint
    return Looked(validation, find(setup, model, proofs))


def check(setup: Setup, proofs: Path | None = None) -> Checked:
    """Validate a setup and prove it. A proof that passes leaves its certificate in `proofs`, if that is given."""
    try:
        model = setup.build_model()
        program = setup.compile(model, unsure=UNSURE)
        looked = look(setup, model, validated(setup, program, model), proofs or FOLDER)
    except PlanError as error:
        return Checked(error.diagnostics)
    if looked.refused:
        return Checked(looked.found)
    if setup.mesh.world_size == 1:
        return Checked(looked.found, NOTHING)
    if looked.known.certificate is not None:
        return Checked(looked.found, told(looked.known))
    proven = prove_quickly(setup, looked.known, program.diagnostics, proofs, SECONDS, force=looked.unsure)
    found = looked.found
    if proven.passed:
        found = settled(found)
    elif not proven.made:
        found = doubted(found)
    if proven.difference is not None and not only_unsure(found):
        found = in_order((*found, proven.difference))
    return Checked(found, proven.line)


def require_proof(setup: Setup, proofs: Path) -> Checked:
    """Validate a setup, and look for its certificate in `proofs`: that there is none is an error. Nothing is proven."""
    try:
        model = setup.build_model()
        validation = validated(setup, setup.compile(model, unsure=UNSURE), model)
        looked = look(setup, model, validation, proofs)
    except PlanError as error:
        return Checked(error.diagnostics)
    if looked.refused:
        return Checked(looked.found)
    if looked.known.certificate is None:
        return Checked(in_order((*looked.found, missing(looked.known))))
    return Checked(looked.found, told(looked.known))
