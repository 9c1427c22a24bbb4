"""Cuts a model: builds the stages that run on this rank, and leaves out of the model what runs on others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.language.pipeline.actions import stages_of
from parallelizer.language.pipeline.settings import stage_rank
from parallelizer.language.pipeline.stages import Stages
from parallelizer.language.plan import full_name
from parallelizer.runtime.pipeline.channels import new_group
from parallelizer.runtime.pipeline.live import SharedParameter
from parallelizer.runtime.pipeline.meta_copy import meta_copy
from parallelizer.runtime.pipeline.stage_model import StageModel, leave_out
from parallelizer.styles.application import Application, Program
from parallelizer.styles.tied_parameters import parameter_names, tied_names
from parallelizer.torch_private import drop_parameter


@dataclass(frozen=True)
class Cut:
    """The stages of this rank, by number; the groups of names that are one parameter here; the parameters that other
    stages hold too; and the model as it was, on meta.
    """

    models: dict[int, StageModel]
    tied: list[tuple[str, ...]]
    shared: tuple[SharedParameter, ...]
    whole: nn.Module


def cut(program: Program, model: nn.Module, mesh: DeviceMesh) -> Cut:
    """Cut the model in place. Collective: the ranks that hold a parameter of several stages make a group."""
    stages = program.require_stages()
    placed = stage_rank(stages.pipeline, mesh["pp"].size())
    mine = stages_of(placed, mesh.get_local_rank("pp"))
    whole = dict(model.named_modules())
    tied, uncut = tied_names(model), meta_copy(model)
    models: dict[int, StageModel] = {}
    for index in mine:
        models[index] = StageModel(model, stages, index, mesh, models.values())
    _separate(model, stages, tied)
    shared = tuple(_shared(stages, placed, mesh))
    for path in sorted(stages.divided):
        for name, param in list(uncut.get_submodule(path).named_parameters(recurse=False)):
            if not set(stages.holding(full_name(path, name))) & set(mine):
                for one in models.values():
                    one.absent.setdefault(one.model.get_submodule(path), {})[name] = param
                drop_parameter(whole[path], name)
    units = (p for p in whole if p and p not in stages.divided and p.rpartition(".")[0] in stages.divided)
    leave_out(model, [unit for unit in units if not set(stages.holding(f"{unit}.")) & set(mine)])
    present = parameter_names(model)
    groups = [tuple(n for n in group if n in present) for group in tied]
    together = [g for group in groups for g in _one_parameter(group, present)]
    return Cut(models, together, shared, uncut)


def of_stage(program: Program, index: int, model: StageModel) -> Program:
    """The part of a program that concerns one stage. FSDP's root unit is the stage itself, in which the model is called
    `model`.
    """
    stages = program.require_stages()
    inside = model.stage.units | model.stage.recomputed
    names = {id(p): n for n, p in parameter_names(model.model).items()}
    aliases = {group: [n for n in group if n in names.values()] for group in stages.shared}
    own = {n for n in names.values() if _held(n, stages, index)}
    kept = []
    for application in program:
        path = application.module
        if path not in stages.divided and not any(path == u or path.startswith(f"{u}.") for u in inside):
            continue
        if application.slot == "fsdp":
            there = _of_unit(application, own, aliases)
            if not there.params:
                continue
            application = there if path else _renamed(there)
        kept.append(application)
    return replace(program, applications=tuple(kept), stages=None)


def _held(name: str, stages: Stages, index: int) -> bool:
    path = name.rpartition(".")[0]
    return path not in stages.divided or name in stages.stages[index].parameters


def _of_unit(unit: Application, own: set[str], aliases: dict[tuple[str, ...], list[str]]) -> Application:
    """A unit with those of its parameters that the stage has, each under the name that it has there."""
    params, reasons = {}, {}
    for name, placement in unit.params.items():
        full = full_name(unit.module, name)
        group = next((g for g in aliases if full in g), (full,))
        for there in aliases.get(group, [full]):
            if there in own and there.startswith(f"{unit.module}." if unit.module else ""):
                short = there[len(unit.module) + 1 :] if unit.module else there
                params[short] = placement
                if name in unit.reasons:
                    reasons[short] = unit.reasons[name]
    return replace(unit, params=params, reasons=reasons)


def _renamed(unit: Application) -> Application:
    return replace(
        unit,
        params={f"model.{n}": p for n, p in unit.params.items()},
        reasons={f"model.{n}": r for n, r in unit.reasons.items()},
    )


def _separate(model: nn.Module, stages: Stages, tied: Sequence[tuple[str, ...]]) -> None:
    """Give each stage a copy of its own of a parameter that several stages hold, also where they are on one rank: FSDP
    gathers it for each of them.
    """
    for group in tied:
        if group not in stages.shared:
            continue
        seen: dict[int | None, nn.Parameter] = {}
        for name in group:
            path, _, leaf = name.rpartition(".")
            # One that no forward uses is on the first stage.
            at = None if path in stages.divided else stages.holding(name)[0]
            param = model.get_parameter(name)
            if at not in seen:
                seen[at] = param if not seen else _copy(param)
            setattr(model.get_submodule(path), leaf, seen[at])


def _copy(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(param).copy_(param.detach()), param.requires_grad)


def _shared(stages: Stages, placed: tuple[int, ...], mesh: DeviceMesh) -> Iterator[SharedParameter]:
    """The shared parameters that are on this rank."""
    rank = mesh.get_local_rank("pp")
    for group in stages.shared:
        by_name = {name: stages.holding(name) for name in group}
        ranks = sorted({placed[s] for on in by_name.values() for s in on})
        process_group = None
        if len(ranks) > 1:
            line = dist.get_process_group_ranks(mesh.get_group("pp"))
            # torch names a group by the number of groups that a rank has, so the ranks without a copy make one too.
            alike = [line[r] for r in range(len(line)) if (r in ranks) == (rank in ranks)]
            made = new_group(alike)
            process_group = made if rank in ranks else None
        first = min(s for on in by_name.values() for s in on)
        for name, on in by_name.items():
            if any(placed[stage] == rank for stage in on):  # stages of one rank may have one copy
                owner = first in on and placed[first] == rank
                yield SharedParameter(group[0], name, owner, process_group)


def _one_parameter(group: tuple[str, ...], present: dict[str, nn.Parameter]) -> list[tuple[str, ...]]:
    """Those of the names that are still one parameter."""
    by_id: dict[int, list[str]] = {}
    for name in group:
        by_id.setdefault(id(present[name]), []).append(name)
    return [tuple(names) for names in by_id.values() if len(names) > 1]


def others_of(model: StageModel) -> frozenset[nn.Parameter]:
    """The parameters of divided modules that another stage of this rank has: the two share these modules' dictionaries."""
    own = model.stage.parameters
    return frozenset(
        param
        for path, module in model.model.named_modules()
        if path in model.divided
        for name, param in module.named_parameters(recurse=False)
        if full_name(path, name) not in own
    )
