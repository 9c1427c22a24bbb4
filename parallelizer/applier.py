"""Applications x live model x DeviceMesh -> parallel model. The only file that changes a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from parallelizer import torch_private
from parallelizer.compiled import compile_forward
from parallelizer.compiler import Application, Program
from parallelizer.compiler import compile as compile_plan
from parallelizer.context import intercept
from parallelizer.context.buffers import LocalBuffers
from parallelizer.context.order import static_order
from parallelizer.context.sequence import CurrentOrder
from parallelizer.forwards import wrap_forward
from parallelizer.hugging_face import layout, masks
from parallelizer.hugging_face.recognise import is_pretrained
from parallelizer.load import load_plan
from parallelizer.mesh import data_groups, describe, fsdp_mesh, rename_axes, submesh, with_shard_axis
from parallelizer.notes import add_notes
from parallelizer.plan import Plan, StyleDefaults, full_name
from parallelizer.state import ParallelState, remember
from parallelizer.styles.fsdp import DTYPES
from parallelizer.styles.io import SplitSequence
from parallelizer.tied_parameters import parameter_names, tie, tied_names
from parallelizer.whole_parameters import compute_in, sum_gradients_of
from parallelizer.workload import Workload


def apply(program: Program, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make a model parallel in place and return it.

    The model is the one the program was compiled for, on meta (then call `materialize`) or with the same
    values on every rank. Collective: every rank calls it. Raises ValueError, with the model untouched, when
    the mesh has other sizes than the program; after any other failure the model is half changed and should be
    thrown away.
    """
    if describe(mesh) != program.mesh:
        raise ValueError(f"the program was compiled for {program.mesh}, the DeviceMesh is {describe(mesh)}")
    units = program.of_slot("fsdp")
    if units:
        mesh = with_shard_axis(mesh)
    meta = any(p.is_meta for p in model.parameters())
    modules = dict(model.named_modules())
    tied, frozen = tied_names(model), [n for n, p in parameter_names(model).items() if not p.requires_grad]
    _compute_whole_parameters(units, model)
    sequence = CurrentOrder(static_order(program.plan.balance, program.mesh.sizes["cp"]))
    for application in program.of_slot("params", "io"):
        _tensor_style(application, modules[application.module], mesh, meta, sequence)
    tie(model, tied)  # each name has got a DTensor of its own
    for name in frozen:  # which torch's SequenceParallel forgets
        model.get_parameter(name).requires_grad_(False)
    for application in program.of_slot("attention"):
        options = intercept.ContextOptions(
            keep_gathered=bool(application.options.get("keep_gathered")),
            method=str(application.options.get("method", "all-gather")),
            ulysses_degree=application.options.get("ulysses_degree"),
        )
        intercept.wrap(
            modules[application.module],
            mesh[application.axes[0]],
            options,
            name=application.module,
            sequence=sequence,
        )
    for application in program.of_slot("checkpoint"):
        _recompute(modules[application.module], application.options.get("mode", "full"))
    for application in program.of_slot("compile"):
        compile_forward(modules[application.module], application.options)
    for application in units:
        _shard_data(application, modules[application.module], mesh)
    _sum_gradients(model)
    groups = tuple(data_groups(mesh))
    sum_gradients_of(model, {name: groups for unit in units for name in _whole(unit)})
    add_notes(program, model)
    packed = {full_name(a.module, n): p for a in program for n, p in a.packed.items()}
    buffers = LocalBuffers(model, program.plan, mesh, sequence)
    if is_pretrained(model):
        layout.switch(model, program)
        made = program.plan.batch.get("position_ids")
        masks.follow(
            model,
            sequence,
            mesh.get_local_rank("cp") if program.mesh.sizes["cp"] > 1 else 0,
            program.mesh.sizes["tp"],
            positions_made=made is not None and made.make is not None,
        )
    names = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
    remember(model, ParallelState(program, mesh, packed, buffers, groups, names))
    return model


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


def _tensor_style(
    application: Application, module: nn.Module, mesh: DeviceMesh, meta: bool, sequence: CurrentOrder
) -> None:
    if application.act is None:
        raise ValueError(
            f"the application of {application.style} to {application.module} has no ParallelStyle"
        )
    act = application.act
    if isinstance(act, SplitSequence):
        act = SplitSequence(act.layouts, sequence)
    # Without values there is nothing to send; with values, rank 0's are everyone's, as in torch.
    parallelize_module(module, submesh(mesh, application.axes), act, src_data_rank=None if meta else 0)


def _recompute(module: nn.Module, mode: str) -> None:
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        costly = torch_private.costly_operators()
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, costly)

    def around(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    wrap_forward(module, around)


def _shard_data(application: Application, module: nn.Module, mesh: DeviceMesh) -> None:
    options, device_mesh = application.options, fsdp_mesh(mesh)
    params = {
        module.get_parameter(n): next(iter(by_axis.values())) for n, by_axis in application.params.items()
    }
    dims = {id(param): p.dim for param, p in params.items() if p.dim is not None}
    whole = {param for param, p in params.items() if p.dim is None}
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


def _compute_whole_parameters(units: Sequence[Application], model: nn.Module) -> None:
    """What FSDP's mixed precision does for its own parameters, for those that it leaves whole."""
    for unit in units:
        dtype = _dtype(unit.options.get("param_dtype"))
        if dtype is not None:
            compute_in(model, _whole(unit), dtype)


def _whole(unit: Application) -> list[str]:
    """The full names of the parameters that a unit leaves whole."""
    return [full_name(unit.module, name) for name in unit.params if unit.reasons.get(name)]


def _sum_gradients(model: nn.Module) -> None:
    """FSDP sums gradients instead of averaging: what a token weighs is the loss's business (see
    `train_step`).
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _dtype(name: str | None) -> torch.dtype | None:
    return DTYPES[name] if name else None
