"""A plan, a model and a mesh in one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.compiler.compile import compile as compile_plan
from parallelizer.language.load import load_plan
from parallelizer.language.plan import Plan, StyleDefaults
from parallelizer.language.workload import Workload
from parallelizer.mesh import rename_axes
from parallelizer.runtime.apply import apply


def parallelize(
    model: nn.Module,
    plan: Plan | str | Path,
    mesh: DeviceMesh,
    *,
    axes: Mapping[str, str] | None = None,
    workload: Workload | None = None,
    defaults: Mapping[str, StyleDefaults] | None = None,
    redistribute: str = "greedy",
) -> nn.Module:
    """Load, compile and apply a plan in one call: a plan by name, path or as loaded.

    `axes` renames the axes of a DeviceMesh that has names of its own, `{"data": "dp_shard", "model": "tp"}`: see
    `rename_axes`, which does it once for all functions.
    `redistribute` is how DTensors of several axes move in `train_step` and `evaluate`: `greedy` or `min-cost`.
    Raises PlanError, with the model untouched, when anything that was written is wrong.
    """
    loaded = plan if isinstance(plan, Plan) else load_plan(str(plan))
    ours = rename_axes(mesh, axes)
    program = compile_plan(
        loaded, model, ours, workload=workload, defaults=defaults, redistribute=redistribute
    )
    return apply(program, model, ours)
