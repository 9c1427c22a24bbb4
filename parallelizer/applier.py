"""Applications x live model x DeviceMesh -> parallel model. The only file that changes a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from parallelizer import torch_private
from parallelizer.compiler import Application, Program
from parallelizer.compiler import compile as compile_plan
from parallelizer.context import intercept
from parallelizer.context.buffers import LocalBuffers
from parallelizer.mesh import describe, fsdp_mesh, rename, submesh
from parallelizer.plan import Plan, StyleDefaults, full_name
from parallelizer.state import ParallelState, remember
from parallelizer.styles.fsdp import DTYPES
from parallelizer.whole_parameters import sum_gradients_of
from parallelizer.workload import Workload


def apply(program: Program, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make a model parallel in place and return it.

    The model is the one the program was compiled for, on meta (then call `materialize`) or with the same values on every
    rank. Collective: every rank calls it. Raises ValueError, with the model untouched, when the mesh has other sizes than
    the program; after any other failure the model is half changed and should be thrown away.
    """
    if describe(mesh) != program.mesh:
        raise ValueError(f"the program was compiled for {program.mesh}, the DeviceMesh is {describe(mesh)}")
    meta = any(p.is_meta for p in model.parameters())
    modules = dict(model.named_modules())
    for application in program:
        module = modules[application.module]
        match application.slot:
            case "params" | "io":
                _tensor_style(application, module, mesh, meta)
            case "attention":
                options = intercept.ContextOptions(keep_gathered=bool(application.options.get("keep_gathered")))
                intercept.wrap(module, mesh[application.axes[0]], options, name=application.module)
            case "checkpoint":
                _recompute(module, application.options.get("mode", "full"))
            case "fsdp":
                _shard_data(application, module, mesh)
    _sum_gradients(model)
    sum_gradients_of(model, _whole_parameters(program, mesh))
    packed = {full_name(a.module, n): p for a in program for n, p in a.packed.items()}
    groups = tuple(g for g in fsdp_mesh(mesh).get_all_groups() if dist.get_world_size(g) > 1)
    remember(model, ParallelState(program, mesh, packed, LocalBuffers(model, program.plan, mesh), groups))
    return model


def parallelize(
    model: nn.Module,
    plan: Plan | str | Path,
    mesh: DeviceMesh,
    *,
    axes: Mapping[str, str] | None = None,
    workload: Workload | None = None,
    defaults: Mapping[str, StyleDefaults] | None = None,
) -> nn.Module:
    """Load, compile and apply a plan in one call: a plan by name, path or as loaded.

    `axes` renames the axes of a DeviceMesh that has names of its own, `{"data": "dp_shard", "model": "tp"}`. Raises
    PlanError, with the model untouched, when anything that was written is wrong.
    """
    from parallelizer.config import load_plan

    loaded = plan if isinstance(plan, Plan) else load_plan(str(plan))
    ours = rename(mesh, axes) if axes else mesh
    return apply(compile_plan(loaded, model, ours, workload=workload, defaults=defaults), model, ours)


def _tensor_style(application: Application, module: nn.Module, mesh: DeviceMesh, meta: bool) -> None:
    if application.act is None:
        raise ValueError(f"the application of {application.style} to {application.module} has no ParallelStyle")
    # Without values there is nothing to send; with values, rank 0's are everyone's, as in torch.
    parallelize_module(module, submesh(mesh, application.axes), application.act, src_data_rank=None if meta else 0)


def _recompute(module: nn.Module, mode: str) -> None:
    """Wrap forward, not the module, so that parameter names stay as they are."""
    inner = module.forward
    context = {"context_fn": functools.partial(create_selective_checkpoint_contexts, torch_private.costly_operators())}

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **(context if mode == "selective" else {}), **kwargs)

    module.forward = forward  # type: ignore[method-assign]


def _shard_data(application: Application, module: nn.Module, mesh: DeviceMesh) -> None:
    options, device_mesh = application.options, fsdp_mesh(mesh)
    params = dict(module.named_parameters())
    placements = {n: next(iter(by_axis.values())) for n, by_axis in application.params.items()}
    dims = {id(params[n]): p.dim for n, p in placements.items() if p.dim is not None}
    whole = {params[n] for n, p in placements.items() if p.dim is None}
    more: dict[str, Any] = {}
    if options.get("param_dtype") or options.get("reduce_dtype"):
        more["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=_dtype(options.get("param_dtype")), reduce_dtype=_dtype(options.get("reduce_dtype"))
        )
    if options.get("cpu_offload"):
        more["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    if any(d for d in dims.values()):
        more["shard_placement_fn"] = lambda param: Shard(dims[id(param)]) if id(param) in dims else None
    fully_shard(
        module,
        mesh=device_mesh,
        reshard_after_forward=options.get("reshard_after_forward"),
        ignored_params=whole or None,
        **more,
    )


def _whole_parameters(program: Program, mesh: DeviceMesh) -> dict[str, list[dist.ProcessGroup]]:
    """The parameters that fsdp leaves whole, and the groups to sum their gradients over."""
    units = program.of_slot("fsdp")
    groups = [g for g in fsdp_mesh(mesh).get_all_groups() if dist.get_world_size(g) > 1] if units else []
    return {full_name(u.module, n): groups for u in units for n in u.params if u.reasons.get(n)}


def _sum_gradients(model: nn.Module) -> None:
    """FSDP sums gradients instead of averaging: what a token weighs is the loss's business (see `train_step`)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _dtype(name: str | None) -> torch.dtype | None:
    return DTYPES[name] if name else None


