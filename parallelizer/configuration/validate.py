"""What is wrong with a setup, or with a model under a plan, without a proof. `parallelizer.proof.validate` adds the proof and
the certificate: `pz.validate`, the command `validate` and the training recipe ask there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from parallelizer.configuration.argument_places import own_place
from parallelizer.configuration.setup import MODEL_KEYS, Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.load import load_plan
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import Mesh, Plan, StyleDefaults
from parallelizer.language.workload import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallelizer.child.shared_calls import SharedCalls
    from parallelizer.runtime.step import Loss
    from parallelizer.simulate.validate import Validation
    from parallelizer.styles.application import Program


def validate(
    subject: Setup | nn.Module,
    plan: Plan | str | Path | None = None,
    mesh: Mesh | Mapping[str, int] | None = None,
    *,
    workload: Workload | None = None,
    loss: Loss | None = None,
    defaults: Mapping[str, StyleDefaults] | None = None,
    pipeline: Pipeline | None = None,
    unsure: Collection[str] = (),
) -> tuple[Diagnostic, ...]:
    """All findings of `parallelizer validate` for a setup, or for a model under a plan on a mesh: notes,
    then warnings, then errors, each sorted by position.

    The model may be on meta or not, and is unchanged. `plan` is a plan, its name or its path; `mesh` has the sizes of axes,
    `pipeline` the schedule of one with `pp`. With a `workload`, batch, sequence and heads are checked as well. With
    `loss(output, batch)` too, one step is followed and one is traced on simulated ranks, which finds errors that no file
    shows. This forks the process, which must not have a process group; one that has used CUDA starts new processes instead,
    for which the model and the loss must pickle. Raises ValueError for a model without a plan or a mesh. The step runs in
    spite of errors whose codes are all in `unsure`.
    """
    try:
        if isinstance(subject, Setup):
            model = subject.build_model()
            return validated(subject, subject.compile(model, unsure=unsure), model).found
        if plan is None or mesh is None:
            raise ValueError("validating a model needs a plan and a mesh: validate(model, plan, mesh)")
        plan = plan if isinstance(plan, Plan) else load_plan(str(plan))
        mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
        return _validate_model(subject, plan, mesh, workload, loss, defaults, pipeline, unsure)
    except PlanError as error:
        return error.diagnostics


def validated(
    setup: Setup,
    program: Program,
    model: nn.Module,
    *,
    rank: int = 0,
    classes: bool = False,
    nodes: Sequence[int] | None = None,
) -> Validation:
    """Everything that is found about a setup's program, with the traced step of `rank`, and with `classes` what ranks of
    every other class hold. `model` is as it was compiled, and left as it is; `nodes` are the numbers of ranks on each node,
    where they are known.
    """
    with validating(setup, program, model, rank=rank, classes=classes, nodes=nodes) as finish:
        return finish()


@contextmanager
def validating(
    setup: Setup,
    program: Program,
    model: nn.Module,
    *,
    rank: int = 0,
    classes: bool = False,
    nodes: Sequence[int] | None = None,
    shared: SharedCalls | None = None,
) -> Iterator[Callable[[], Validation]]:
    """As `validated`, while the body of the `with` runs. The function that is yielded waits for the result. `shared` as in
    `running_steps`.
    """
    from parallelizer.simulate import validate as simulated
    from parallelizer.simulate.places import Places

    recipe, wrong, origins = None, tuple[Diagnostic, ...](), setup.origins
    try:
        recipe = setup.recipe()
    except PlanError as error:
        wrong = error.diagnostics
    with simulated.validating(
        program,
        model,
        recipe,
        also=wrong,
        hardware=setup.hardware,
        nodes=nodes,
        optimizer=setup.optim,
        places=Places(
            own_place(origins),
            origins.span("model.loss"),
            tuple(origins.set_inside("model", MODEL_KEYS).values()),
            origins.span("optim.fused") or origins.span("optim"),
            tuple(entry for entry in setup.plan.batch.values() if entry.make is not None),
        ),
        rank=rank,
        classes=classes,
        shared=shared,
    ) as finish:
        yield finish


def _validate_model(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    workload: Workload | None,
    loss: Loss | None,
    defaults: Mapping[str, StyleDefaults] | None,
    pipeline: Pipeline | None,
    unsure: Collection[str],
) -> tuple[Diagnostic, ...]:
    from parallelizer.compiler.compile import compile as compile_plan
    from parallelizer.simulate.meta_copy import meta_copy
    from parallelizer.simulate.record.trace import Recipe
    from parallelizer.simulate.validate import validating as validating_program
    from parallelizer.styles.experts.stack import stack_experts

    model = stack_experts(meta_copy(model), plan)
    program = compile_plan(
        plan, model, mesh, workload=workload, defaults=defaults, pipeline=pipeline, unsure=unsure
    )
    recipe = Recipe(workload, loss, _adamw, None) if workload is not None and loss is not None else None
    with validating_program(program, model, recipe) as finish:
        return finish().found


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(model.parameters(), fused=True)
