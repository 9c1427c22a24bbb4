"""Plan x module tree x mesh -> applications.

The compiler is a loop over `PASSES`. It reads the model (on the meta device or not) and does not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.compiler import all_checks as checks
from parallelizer.compiler.compilation import Compilation
from parallelizer.compiler.experts import share_experts
from parallelizer.compiler.match import match
from parallelizer.compiler.pipeline.divide import divide
from parallelizer.compiler.resolve import resolve, shard_data
from parallelizer.diagnostics.diagnostic import PlanError, in_order
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import SLOTS, Mesh, Option, Plan, StyleDefaults
from parallelizer.language.routing import BALANCED, Routing
from parallelizer.language.workload import Workload
from parallelizer.mesh import describe
from parallelizer.styles.application import Program


def compile(
    plan: Plan,
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    *,
    workload: Workload | None = None,
    defaults: Mapping[str, StyleDefaults] | None = None,
    redistribute: str = "greedy",
    max_unsharded: Option | None = None,
    pipeline: Pipeline | None = None,
    routing: Routing = BALANCED,
    force: bool = False,
    unsure: Collection[str] = (),
) -> Program:
    """Compile a plan for a model on a mesh.

    With a `workload`, batch, sequence, positions and attention heads are checked as well. `defaults` are a
    preset's options by style. `redistribute` is the method for DTensors of several axes, `greedy` or
    `min-cost`. `max_unsharded` is the largest share of parameters that may be whole without a rule. `pipeline`
    are the settings of the pipeline where the mesh has an axis `pp` above 1, which also needs a workload. `routing` is
    what dry runs assume of the tokens of experts. Raises
    PlanError with all findings of the stage that failed; the model is unchanged. With `force`, errors of
    `check` are returned in the program instead, to find out whether they were right; without it, so are those whose codes are all
    in `unsure`.
    """
    sizes = describe(mesh) if isinstance(mesh, DeviceMesh) else mesh
    state = Compilation(plan, model, sizes, workload, defaults or {}, max_unsharded, pipeline)
    state.modules = dict(model.named_modules())
    state.parameters = dict(model.named_parameters())
    for stage in PASSES:
        for step in stage:
            step(state)
        # What comes after would only report consequences.
        errors = {one.code for one in state.diagnostics if one.severity == "error"}
        if errors and not (check in stage and (force or errors <= set(unsure))):
            raise PlanError(state.diagnostics)
    return Program(
        _settled(plan, state),
        sizes,
        tuple(state.applications),
        in_order(state.diagnostics),
        redistribute=redistribute,
        stages=state.stages,
        routing=routing,
    )


def _settled(plan: Plan, state: Compilation) -> Plan:
    """The plan, with what a preset may have set: how the sequence is dealt out."""
    said = [a.options["balance"] for a in state.applications if "balance" in a.options]
    return replace(plan, balanced=str(said[0])) if said else plan


def look(state: Compilation) -> None:
    """What a model must be for anything else to be asked of it."""
    for one in checks.FIRST:
        state.diagnostics.extend(one(state))


def check(state: Compilation) -> None:
    """Everything that is known before the model runs; one file each in `checks/`."""
    for one in checks.CHECKS:
        state.diagnostics.extend(one(state))


def order(state: Compilation) -> None:
    """Tensor styles, then context parallelism, checkpointing, compile, fsdp; modules in their own order, FSDP
    innermost first.
    """
    state.applications.sort(key=lambda a: SLOTS.index(a.slot))


PASSES: tuple[tuple[Callable[[Compilation], None], ...], ...] = (
    (look,),
    (match, resolve, share_experts, divide, shard_data, order),
    (check,),
)
"""The passes, in stages: errors of one end the compilation."""
