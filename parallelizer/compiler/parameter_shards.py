"""The shard of every parameter on one rank: shapes, placements and bytes, computed from the program alone.

Tensor axes split first, then the data axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from parallelizer.language.plan import AXES, EXPERT, EXPERT_SHARDS, REPLICATE, Placement, full_name
from parallelizer.mesh import cut
from parallelizer.styles.application import Application, Program, tensor_placements


@dataclass(frozen=True)
class ParameterShard:
    """One parameter as one rank holds it. `placements` has every axis above 1, `dp_shard+cp` folded; `bytes`
    are local.

    `styles` are the styles that stand on its module, `reason` says why fsdp leaves it whole.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placements: Mapping[str, str]
    bytes: int
    styles: tuple[str, ...]
    reason: str | None = None


def parameter_shards(program: Program, model: nn.Module, rank: int = 0) -> list[ParameterShard]:
    """Every parameter of `model` (as it was compiled: unsharded) on one rank, in the model's order. Of a model that is cut
    into stages those of the rank's own; one that two of these hold stands there twice.
    """
    mesh, where = program.mesh, program.mesh.coordinate(rank)
    data = _data_placements(program)
    tensor = tensor_placements(program.applications)
    styles: dict[str, list[str]] = {}
    for application in program.of_slot("params", "experts"):
        for name in application.params:
            styles.setdefault(full_name(application.module, name), []).append(application.style)
    shards = []
    for name, param in _on_stages(program, model, where["pp"]):
        unit, relative = data.get(name, (None, ""))
        shape = list(param.shape)
        placements: dict[str, Placement] = {}
        if EXPERT in tensor.get(name, {}):
            placements, shape = _of_experts(program, tensor[name][EXPERT], unit, relative, shape)
        for axis in () if placements else AXES:
            placement = tensor.get(name, {}).get(axis)
            if placement is not None and placement.dim is not None:
                _, shape[placement.dim] = cut(shape[placement.dim], mesh.sizes[axis], where[axis])
            if mesh.sizes[axis] > 1 and axis not in mesh.fsdp_axes:
                placements[axis] = placement or REPLICATE
        if EXPERT in tensor.get(name, {}):
            pass
        elif unit is not None and mesh.fsdp_axes:
            axis, placement = next(iter(unit.params[relative].items()))
            index = 0
            for part in mesh.fsdp_axes:
                index = index * mesh.sizes[part] + where[part]
            if placement.dim is not None:
                _, shape[placement.dim] = cut(shape[placement.dim], mesh.size(*mesh.fsdp_axes), index)
            placements[axis] = placement
        elif mesh.fsdp_axes:
            placements["+".join(mesh.fsdp_axes)] = REPLICATE
        shards.append(
            ParameterShard(
                name,
                str(param.dtype).removeprefix("torch."),
                tuple(param.shape),
                tuple(shape),
                {
                    a: str(placements[a])
                    for a in sorted(placements, key=lambda a: _ORDER.index(a.split("+")[0]))
                },
                math.prod(shape) * param.element_size(),
                (*styles.get(name, []), *(("fsdp",) if unit is not None else ())),
                unit.reasons.get(relative) if unit is not None else None,
            )
        )
    return shards


_ORDER = (*AXES[:2], EXPERT_SHARDS, EXPERT, *AXES[2:])


def _of_experts(
    program: Program, over: Placement, unit: Application | None, relative: str, shape: list[int]
) -> tuple[dict[str, Placement], list[int]]:
    """The placements and the local shape of a parameter of experts. Both axes divide what they cut."""
    mesh = program.mesh
    fsdp = unit.params[relative][EXPERT_SHARDS] if unit is not None else REPLICATE
    placements, local = {EXPERT: over, EXPERT_SHARDS: fsdp}, list(shape)
    for axis, placement in placements.items():
        if placement.dim is not None:
            local[placement.dim] //= mesh.size_of(axis)
    outside = dict.fromkeys(("pp", "dp_replicate"), REPLICATE)
    return {a: p for a, p in {**outside, **placements}.items() if mesh.size_of(a) > 1}, local


def _data_placements(program: Program) -> dict[str, tuple[Application, str]]:
    return {full_name(a.module, n): (a, n) for a in program.of_slot("fsdp") for n in a.params}


def _on_stages(program: Program, model: nn.Module, rank: int) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a rank on `pp`, as often as it holds each."""
    mine = set(program.stages.on_rank(rank)) if program.stages is not None else set[int]()
    for name, param in model.named_parameters():
        copies = 1 if program.stages is None else len(mine & set(program.stages.copies(name)))
        for _ in range(copies):
            yield name, param
