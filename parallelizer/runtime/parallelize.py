"""A plan, a model and a mesh in one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.compiler.compile import compile as compile_plan
from parallelizer.language.fold import fold_paths
from parallelizer.language.load import load_plan
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import Plan, StyleDefaults
from parallelizer.language.workload import Workload
from parallelizer.mesh import describe, rename_axes
from parallelizer.runtime.apply import apply, refuse_sharded
from parallelizer.runtime.equal_values import unequal_over
from parallelizer.styles.experts.stack import stack_experts


def parallelize(
    model: nn.Module,
    plan: Plan | str | Path,
    mesh: DeviceMesh,
    *,
    axes: Mapping[str, str] | None = None,
    workload: Workload | None = None,
    defaults: Mapping[str, StyleDefaults] | None = None,
    redistribute: str = "greedy",
    pipeline: Pipeline | None = None,
    check_values: bool = True,
) -> nn.Module:
    """Load, compile and apply a plan in one call. `plan` is a name, a path or a loaded plan. Collective:
    every rank calls it.

    `axes` renames the axes of a DeviceMesh with other names, such as `{"data": "dp_shard", "model": "tp"}`.
    `rename_axes` does this once for all functions.

    `redistribute` is the method by which `train_step` and `evaluate` redistribute DTensors of several axes:
    `greedy` or `min-cost`.

    A mesh with an axis `pp` needs a workload. `pipeline` then has the schedule and its numbers; without it 1F1B runs.
    `train_step` takes the rows of the data rank on every rank of `pp`.

    A model that has values must have the same values on every rank, for example because each rank built it
    from one seed or read one file. The ranks first compare a checksum of each parameter and buffer.
    `check_values=False` skips this comparison.

    Mistakes that show only in a step are not found here: see `validate`, with a workload and a loss.

    Raises PlanError for a mistake in the plan, and ValueError, on every rank, if ranks hold different
    values or the model is sharded already. The model is unchanged in both cases, beside lists of experts that
    `stack_experts` stacked.
    """
    loaded = plan if isinstance(plan, Plan) else load_plan(str(plan))
    ours = rename_axes(mesh, axes)
    refuse_sharded(model)
    stack_experts(model, loaded)
    program = compile_plan(
        loaded,
        model,
        ours,
        workload=workload,
        defaults=defaults,
        redistribute=redistribute,
        pipeline=pipeline,
    )
    if check_values:
        _check_values(model, ours)
    return apply(program, model, ours)


def _check_values(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ValueError, on every rank, where ranks hold different values: replicas would differ, and shards not fit."""
    held = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if not t.is_meta}
    unequal = unequal_over(held, mesh, [a for a, size in describe(mesh).sizes.items() if size > 1])
    if unequal is None:
        return
    named = ", ".join(fold_paths(unequal.names)[:3]) or "some parameters"
    raise ValueError(
        f"the ranks of {unequal.axis} hold different values in {named}. Build the model after "
        "torch.manual_seed(seed) with one seed for all ranks, read the same file on every rank, or build it on "
        "meta and call parallelizer.materialize(model, seed=seed)"
    )
