"""What the commands `validate` and `verify` do, from Python.

setup = pz.from_overrides(["model=llama_debug", "parallel=tp8_cp2"])
assert not [found for found in pz.validate(setup) if found.severity == "error"]
assert pz.verify(setup).passed
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallelizer.compose import compose_config
from parallelizer.config import from_config
from parallelizer.diagnostics import Diagnostic, PlanError
from parallelizer.plan import Mesh, Plan, StyleDefaults
from parallelizer.setup import Setup
from parallelizer.workload import Workload

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.step import Loss
    from parallelizer.verify.prove import Proof


def from_overrides(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, config_name: str = "train"
) -> Setup:
    """The setup that a command line asks for: `["model=mine", "parallel=tp2"]`, with `--config-dir` as `config_dir`.

    Raises PlanError with everything in it that is wrong.
    """
    return from_config(*compose_config(list(overrides), config_dir, config_name))


def validate(
    subject: Setup | nn.Module,
    plan: Plan | str | Path | None = None,
    mesh: Mesh | Mapping[str, int] | None = None,
    *,
    workload: Workload | None = None,
    loss: Loss | None = None,
    defaults: Mapping[str, StyleDefaults] | None = None,
) -> tuple[Diagnostic, ...]:
    """Every finding of `parallelizer validate`, errors and warnings, about a setup, or a model under a plan on a mesh.

    A model is looked at as it is, on meta or not, and left so. `plan` is a plan, its name or its path, `mesh` has the sizes
    of axes. `workload` lets batch, sequence and heads be checked; with `loss(output, batch)` too, one step is followed on a
    fake world, which needs no ranks and finds what no file can tell. The process forks for that: it must have no process
    group, and torch has one thread in it from now on. Raises ValueError for a model without a plan or a mesh.
    """
    import torch

    from parallelizer.across_nodes import across_nodes, nodes_of
    from parallelizer.checks.idle_rules import idle_rules
    from parallelizer.checks.layout_flow import check_layout_flow

    torch.set_num_threads(1)
    try:
        if isinstance(subject, Setup):
            setup, model = subject, subject.build_model()
        else:
            setup = _given(plan, mesh, workload, loss, defaults)
            model = _on_meta(subject)
        program = setup.compile(model)
        crossing = across_nodes(setup.mesh, nodes_of(setup.mesh, setup.hardware), setup.hardware)
        followed: tuple[Diagnostic, ...] = ()
        if not isinstance(setup, _Given) or (workload is not None and loss is not None):
            followed = check_layout_flow(setup, program, model)
        return (*program.diagnostics, *crossing, *idle_rules(program), *followed)
    except PlanError as error:
        return error.diagnostics


def verify(
    setup: Setup, *, full_mesh: bool = False, seed: int = 0, force: bool = False, dtype: str = "float64"
) -> Proof:
    """The proof of `parallelizer verify`: the tiny form of a setup on one process and on real CPU ranks, all compared.

    `Proof.passed` says whether they are equal; the arguments are the command's options. For a model without a
    configuration: `parallelizer.testing.assert_equivalent`. The process forks, so it must have no process group, and torch
    has one thread in it from now on. Raises PlanError when the plan is refused, unless `force`, and LaunchError when a
    rank fails.
    """
    import torch

    from parallelizer.verify.prove import prove

    torch.set_num_threads(1)
    return prove(setup, full_mesh=full_mesh, seed=seed, force=force, dtype=dtype)


@dataclass(frozen=True)
class _Given(Setup):
    """A setup that nobody has written down: its loss is a function."""

    function: Loss | None = None

    def loss(self) -> Loss:
        """The function."""
        if self.function is None:
            raise ValueError("no loss was given")
        return self.function


def _given(
    plan: Plan | str | Path | None,
    mesh: Mesh | Mapping[str, int] | None,
    workload: Workload | None,
    loss: Loss | None,
    defaults: Mapping[str, StyleDefaults] | None,
) -> Setup:
    from parallelizer.load import load_plan

    if plan is None or mesh is None:
        raise ValueError("a model is validated under a plan, on a mesh: validate(model, plan, mesh)")
    return _Given(
        plan=plan if isinstance(plan, Plan) else load_plan(str(plan)),
        mesh=mesh if isinstance(mesh, Mesh) else Mesh(mesh),
        defaults=defaults or {},
        workload=workload,  # type: ignore[arg-type]  # compile takes None for one that nobody knows
        model={},
        loss_path="",
        device_choice="cpu",
        function=loss,
    )


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without memory. Tensors that share values still do."""
    import torch
    from torch import nn

    made: dict[int, object] = {}
    for parameter in model.parameters():
        made[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        made[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, made)
