"""Applications x live model x DeviceMesh -> parallel model: each style changes its modules, in the program's order."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelizer.compiler.observe.families import family_of
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import full_name
from parallelizer.language.styles import STYLES
from parallelizer.mesh import data_groups, describe, with_shard_axis
from parallelizer.runtime.constructor_values import look
from parallelizer.runtime.exception_notes import add_notes
from parallelizer.runtime.packed_warning import warn_of_packed
from parallelizer.runtime.pipeline.cut import cut, of_stage, others_of
from parallelizer.runtime.pipeline.live import LivePipeline, pipeline_of
from parallelizer.runtime.pipeline.stage_model import StageModel, refuse_calls
from parallelizer.runtime.state import ParallelState, remember, reshard
from parallelizer.runtime.sum_over_batch import sums_go_over
from parallelizer.styles.application import Application, Live, Program
from parallelizer.styles.context_parallel.buffers import LocalBuffers
from parallelizer.styles.context_parallel.order import static_order
from parallelizer.styles.context_parallel.sequence import CurrentOrder
from parallelizer.styles.registry import APPLY, PREPARE
from parallelizer.styles.tensor_styles import apply_tensor_style
from parallelizer.styles.tied_parameters import parameter_names, tie, tied_names


def apply(program: Program, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make a model parallel in place and return it.

    The model is the one for which the program was compiled. It is on meta (then call `materialize`), or has
    the same values on every rank. Collective: every rank calls it. Raises ValueError, with the model
    unchanged, if the sizes of the mesh are not those of the program, or if the model is sharded already. After any
    other error the model is only partly changed: discard it.
    """
    if describe(mesh) != program.mesh:
        raise ValueError(
            f"the program was compiled for {program.mesh}, but the DeviceMesh is {describe(mesh)}"
        )
    refuse_sharded(model)
    before: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {
        id(p): (weakref.ref(p), n) for n, p in model.named_parameters()
    }
    if program.of_slot("fsdp"):
        mesh = with_shard_axis(mesh)
        # The logits leave as a view of a DTensor's local tensor, which nothing changes in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    STYLES.load()
    look(model)
    frozen = [n for n, p in parameter_names(model).items() if not p.requires_grad]
    sequence = CurrentOrder(static_order(program.plan.balance, program.mesh.sizes["cp"]))
    live = Live(
        model, mesh, sequence, meta=any(p.is_meta for p in model.parameters()), routing=program.routing
    )
    pipeline: LivePipeline | None = None
    if program.stages is None:
        parts = [AppliedPart(program, model, dict(model.named_modules()))]
        tied = tied_names(model)
    else:
        done = cut(program, model, mesh)
        pipeline = pipeline_of(program.stages, done.models, mesh, done.whole, done.shared)
        parts = [_part(program, index, one) for index, one in done.models.items()]
        tied = done.tied
    _apply_all(parts, model, live, tied, frozen)
    packed = {full_name(a.module, n): p for a in program for n, p in a.packed.items()}
    buffers = LocalBuffers(model, program.plan, mesh, sequence, [part.model for part in parts])
    for part in parts:
        family = family_of(part.model)
        if family is not None:
            family.after_apply(part.model, part.program, mesh, sequence)
    names = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
    if pipeline is not None:
        for one in pipeline.models.values():
            one.watch()
        refuse_calls(model)
        # FSDP does so for modules that it sees; those that cuts divide it sees as the stages have them.
        model.register_state_dict_pre_hook(lambda module, *_: reshard(module))
    now = {id(p) for p in model.parameters()}
    replaced = {at: was for at, was in before.items() if at not in now}
    if packed and program.mesh.sizes["tp"] > 1:
        warn_of_packed(model, list(packed))
    groups = tuple(data_groups(mesh))
    remember(model, ParallelState(program, mesh, packed, buffers, groups, names, pipeline, replaced))
    sums_go_over(groups)
    return model


def refuse_sharded(model: nn.Module) -> None:
    """Raise ValueError for a model that has DTensors already."""
    sharded = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    if sharded:
        raise ValueError(
            f"the model is sharded already: {', '.join(fold_paths(sharded)[:3])} are DTensors. Leave out `fully_shard`, "
            "`parallelize_module` and other calls that shard it, since the rules of the plan do that"
        )


@dataclass(frozen=True)
class AppliedPart:
    """What styles are applied to: a whole model, or one of its stages. `modules` are by the path in the program."""

    program: Program
    model: nn.Module
    modules: Mapping[str, nn.Module]
    stage: StageModel | None = None


def _part(program: Program, index: int, stage: StageModel) -> AppliedPart:
    modules = dict(stage.model.named_modules())
    return AppliedPart(of_stage(program, index, stage), stage.model, modules, stage)


def _apply_all(
    parts: Sequence[AppliedPart],
    model: nn.Module,
    live: Live,
    tied: Sequence[tuple[str, ...]],
    frozen: Sequence[str],
) -> None:
    """Let every style change its module, in the program's order."""
    for part in parts:
        for application in part.program:
            if (prepare := PREPARE.get(application.style)) is not None:
                prepare(application, _module(application, part), live)
        for application in part.program.of_slot("params", "io"):
            _apply(application, part, live)
    tie(model, tied)  # each name has got a DTensor of its own
    there = parameter_names(model)
    for name in frozen:  # which torch's SequenceParallel forgets
        if name in there:
            there[name].requires_grad_(False)
    before = {name: model.get_parameter(name) for name in itertools.chain.from_iterable(tied)}
    for part in parts:
        own = live if part.stage is None else replace(live, others=others_of(part.stage))
        for application in part.program:
            if application.slot not in ("params", "io"):
                _apply(application, part, own)
        add_notes(part.program, part.model)
    # FSDP replaces a parameter in the modules of a stage. A module that no forward calls is in none of them.
    tie(model, [sorted(group, key=lambda name: model.get_parameter(name) is before[name]) for group in tied])


def _module(application: Application, part: AppliedPart) -> nn.Module:
    """The module that an application is for: of FSDP's root the stage itself, around the model."""
    if part.stage is not None and application.slot == "fsdp" and not application.module:
        return part.stage
    return part.modules[application.module]


def _apply(application: Application, part: AppliedPart, live: Live) -> None:
    """Let the application's style change its module."""
    module = _module(application, part)
    APPLY.get(application.style, apply_tensor_style)(application, module, live)
    if part.stage is not None and application.options.get("reshard_after_forward") is False:
        part.stage.kept_gathered.add(module)
    if part.stage is not None and application.slot in ("checkpoint", "compile"):
        part.stage.backward_at_once = True
