"""Compares replicated values between ranks: parameters, persistent buffers, the optimizer's states.

Ranks that start with the same values and apply the same steps keep the same values. A gradient that is not
summed, a faulty device, or a rank that loaded other values makes them drift apart without an error. Each
tensor's bytes become one checksum, and one all-reduce for each axis tells whether all its ranks have the
same.

On GPUs, kernels without a fixed order of summation, such as attention's backward, may give two ranks that
compute the same a different last bit. On GPUs small differences are therefore accepted by default, on a CPU
none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from parallelizer.diagnostics.diagnostic import Diagnostic, Severity
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import EXPERT, EXPERT_SHARDS
from parallelizer.mesh import describe, expert_mesh, places
from parallelizer.runtime.fail_together import gathered_over_model, own_rank
from parallelizer.runtime.guards.agreement import minority
from parallelizer.runtime.guards.checksum import checksum, digest
from parallelizer.runtime.guards.wording import ranks_named
from parallelizer.runtime.pipeline.live import LivePipeline
from parallelizer.runtime.state import (
    device_of,
    every_group,
    persistent_buffers,
    reshard,
    restore_buffers,
    state_of,
)

TOLERANCE = {"cpu": 0.0, "cuda": 1e-4}
"""By kind of device: the largest difference, relative to the tensor's largest value, that is let pass."""


@dataclass(frozen=True)
class Drift:
    """One tensor that ranks should hold alike and do not.

    `name` is the parameter's or buffer's; `state` what the optimizer calls its state of it, or empty. `ranks` differ
    from more than half of the ranks `among`, which should have the same; all of them, where there is no such half.
    `difference` is the largest of all elements', relative to the largest value; infinite where one is a NaN.
    """

    name: str
    state: str
    ranks: tuple[int, ...]
    among: tuple[int, ...]
    difference: float


@dataclass(frozen=True)
class _Held:
    """One tensor as this rank holds it, and the axes of the model's mesh whose ranks hold the same. `copies` are the ranks whose
    stages have a copy of a parameter: then these hold the same too. `of_experts` says that the tensor lies on the mesh that
    shares experts out.
    """

    name: str
    state: str
    local: torch.Tensor
    alike: frozenset[str]
    copies: dist.ProcessGroup | None = None
    of_experts: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.state


Copies = Mapping[str, tuple[str, dist.ProcessGroup]]
"""The parameters of this rank of which stages on other ranks have copies: by their names here, the name of all copies and the
ranks that have one.
"""


def find_drift(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, tolerance: float | None = None
) -> tuple[Drift, ...]:
    """What the ranks of a parallel model hold alike by its plan and not in fact; nothing for any other model.

    Compared by bytes. Where they differ by no more than `tolerance` (see `TOLERANCE` for the default), relative to the
    tensor's largest value, they are let pass. To be called between steps. Collective over all ranks of the model: all
    get the same answer. Where nothing differs it sends two numbers a tensor and axis, and reads one back.
    """
    state = state_of(model)
    if state is None or state.mesh.size() == 1:
        return ()
    mesh, device = state.mesh, device_of(model)
    reshard(model)
    restore_buffers(model)
    axes = {n: mesh.get_group(i) for i, n in enumerate(mesh.mesh_dim_names or ()) if mesh.size(i) > 1}
    if describe(mesh).size_of(EXPERT_SHARDS) > 1 and describe(mesh).ep > 1:
        axes[EXPERT_SHARDS] = expert_mesh(mesh)[EXPERT_SHARDS].get_group()
    copies: Copies = {}
    if state.pipeline is not None:
        del axes["pp"]  # whose ranks hold other tensors, but for these
        copies = _copies(state.pipeline)
    # A tensor that no other rank holds has nothing to be compared with. Of a large model these are nearly all bytes.
    mine = [one for one in _held(model, optimizer, frozenset(axes), copies) if one.alike or one.copies]
    held = _on_all_ranks(model, mine, axes, copies)
    none = torch.zeros(1, dtype=torch.int64, device=device)
    sums = torch.cat([none, *(checksum(one.local).to(device).view(1) for one in held)])[1:]
    # The greatest complement is the least one's: with both, one reduction tells whether all are the same.
    bounds = torch.stack([sums, ~sums])
    alike = [(group, [i for i, one in enumerate(held) if axis in one.alike]) for axis, group in axes.items()]
    alike += [
        (group, [i for i, one in enumerate(held) if one.copies is group]) for _, group in copies.values()
    ]
    for group, indices in alike:
        if indices:
            chosen = torch.tensor(indices, device=device)
            of_group = bounds[:, chosen]
            dist.all_reduce(of_group, dist.ReduceOp.MAX, group=group)
            bounds[:, chosen] = of_group
    differs = bounds[0] != ~bounds[1]
    somewhere = differs.any().float()
    for group in every_group(model):
        dist.all_reduce(somewhere, dist.ReduceOp.MAX, group=group)
    if not somewhere.item():
        return ()
    if tolerance is None:
        tolerance = TOLERANCE.get(device.type, 0.0)
    here = [
        (one, int(value))
        for one, value, bad in zip(held, sums.tolist(), differs.tolist(), strict=True)
        if bad
    ]
    found = [(one, value, _difference(one, axes, device)) for one, value in here]
    return _named(model, mesh, [f for f in found if f[2] > tolerance or tolerance == 0.0])


def _held(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, axes: frozenset[str], copies: Copies
) -> Iterator[_Held]:
    """Everything that is compared, in the model's order."""

    def held(name: str, state: str, tensor: torch.Tensor, sharded: torch.Tensor) -> _Held:
        called, group = copies.get(name, (name, None))
        of_experts = EXPERT in _sharded(sharded)
        could = axes & {"dp_replicate", EXPERT_SHARDS} if of_experts else axes - {EXPERT_SHARDS}
        return _Held(called, state, _local(tensor), could - _sharded(sharded), group, of_experts)

    parameters = list(model.named_parameters())
    for name, tensor in (*parameters, *persistent_buffers(model).items()):
        yield held(name, "", tensor, tensor)
    for name, param in parameters if optimizer is not None else ():
        states = optimizer.state.get(param, {}) if optimizer is not None else {}
        for key in sorted(map(str, states)):
            value = states[key]
            if not isinstance(value, torch.Tensor):
                continue
            if isinstance(value, DTensor) or value.numel() == 1 or not isinstance(param, DTensor):
                yield held(name, key, value, value)
            elif value.shape == _local(param).shape:
                yield held(name, key, value, param)


def _copies(pipeline: LivePipeline) -> Copies:
    """One copy on this rank of each parameter, in an order that is the same on all ranks that have one."""
    found: dict[str, tuple[str, dist.ProcessGroup]] = {}
    taken: set[str] = set()
    for one in sorted(pipeline.shared, key=lambda one: (one.name, one.here)):
        if one.group is not None and one.name not in taken:
            found[one.here] = one.name, one.group
            taken.add(one.name)
    return found


def _sharded(tensor: torch.Tensor) -> frozenset[str]:
    """The axes that a tensor is dealt out over; a folded one is `dp_shard+cp`."""
    if not isinstance(tensor, DTensor):
        return frozenset()
    names = tensor.device_mesh.mesh_dim_names or ()
    pairs = zip(names, tensor.placements, strict=True)
    return frozenset(axis for n, p in pairs if not isinstance(p, Replicate) for axis in n.split("+"))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _on_all_ranks(
    model: nn.Module, held: list[_Held], axes: Mapping[str, dist.ProcessGroup], copies: Copies
) -> list[_Held]:
    """The same list on every rank of a stage, so that numbers meet their likes.

    An optimizer has no states of a parameter that never had a gradient, and that may differ from rank to rank: where
    it does, those that others have stand as empty ones.
    """
    device, of_copies = device_of(model), dict(copies.values())
    keys = [(group, [one.key for one in held]) for group in axes.values()]
    keys += [(group, [one.key for one in held if one.copies is group]) for group in of_copies.values()]
    other = torch.zeros((), device=device)
    for group, some in keys:
        number = torch.tensor(digest(some), device=device)
        bounds = torch.stack([number, -number])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
        other = torch.maximum(other, (bounds[0] != -bounds[1]).float())
    for group in every_group(model):
        dist.all_reduce(other, dist.ReduceOp.MAX, group=group)
    if not other.item():
        return held
    own = {one.key: one for one in held}
    every = gathered_over_model(model, [(one.name, one.state, one.alike) for one in held])
    alike = {(name, state): axes for some in every for name, state, axes in some}
    return [
        own.get(key) or _Held(*key, torch.empty(0), axes, of_copies.get(key[0]))
        for key, axes in sorted(alike.items())
    ]


def _difference(one: _Held, axes: Mapping[str, dist.ProcessGroup], device: torch.device) -> float:
    """How far ranks are apart in one tensor, relative to its largest value. Collective over the ranks that hold it alike."""
    local = one.local
    groups = [group for axis, group in axes.items() if axis in one.alike]
    groups += [one.copies] if one.copies is not None else []
    sizes = torch.tensor([local.numel(), -local.numel()], device=device)
    for group in groups:
        dist.all_reduce(sizes, dist.ReduceOp.MAX, group=group)
    if sizes[0] != -sizes[1]:
        return math.inf
    wide = torch.promote_types(local.dtype, torch.float32)
    high = torch.nan_to_num(local.to(device, wide), nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    both = torch.stack(
        [high, -torch.nan_to_num(local.to(device, wide), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)]
    )
    for group in groups:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    if not bool(torch.isfinite(both).all()):
        return math.inf
    largest = float(both.abs().max())
    return float((both[0] + both[1]).max()) / largest if largest else 0.0


def _named(
    model: nn.Module, mesh: DeviceMesh, found: Sequence[tuple[_Held, int, float]]
) -> tuple[Drift, ...]:
    """Who differs from whom: every rank says what it has of what it knows to differ."""
    mine = [(one.key, _place(one, mesh), value, difference) for one, value, difference in found]
    said: dict[tuple[tuple[str, str], tuple[int, ...]], list[tuple[int, int, float]]] = {}
    for rank, own in sorted(gathered_over_model(model, (own_rank(), mine))):
        for key, where, value, difference in own:
            said.setdefault((key, where), []).append((rank, value, difference))
    drifts = []
    for ((name, state), _), words in said.items():
        ranks, values, differences = zip(*words, strict=True)
        drifts.append(Drift(name, state, tuple(ranks[i] for i in minority(values)), ranks, max(differences)))
    return tuple(drifts)


def _place(one: _Held, mesh: DeviceMesh) -> tuple[int, ...]:
    """Where this rank is on the axes whose ranks hold other values of a tensor."""
    return tuple(
        index
        for axis, (_, index) in places(mesh, of_experts=one.of_experts).items()
        if axis not in one.alike and (axis != "pp" or one.copies is None)
    )


def ranks_drifted(step: int, drifts: Sequence[Drift], severity: Severity = "error") -> Diagnostic:
    """The finding `ranks-drifted` after the step with this number."""
    by_ranks: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[str, list[Drift]]] = {}
    for one in drifts:
        by_ranks.setdefault((one.ranks, one.among), {}).setdefault(one.state, []).append(one)
    told = [f"{_whose(*ranks)} in {_what(by_state)}" for ranks, by_state in by_ranks.items()]
    more = f"; and {len(told) - 4} more" if len(told) > 4 else ""
    message = f"after step {step} ranks differ in values that should be equal: {'; '.join(told[:4])}{more}"
    help = (
        "resume from a checkpoint before it, and prove the plan with `parallelizer verify`: if it passes, suspect the "
        "rank's memory or device"
    )
    return Diagnostic("ranks-drifted", message, None, help, severity)


def _whose(ranks: tuple[int, ...], among: tuple[int, ...]) -> str:
    if ranks == among:
        return f"{ranks_named(ranks)} from each other"
    others = [rank for rank in among if rank not in ranks]
    return f"{ranks_named(ranks)} from {ranks_named(others)}"


def _what(by_state: dict[str, list[Drift]]) -> str:
    parts = []
    for state, drifts in by_state.items():
        folded = fold_paths(one.name for one in drifts)
        names = ", ".join(folded[:3]) + (f" and {len(folded) - 3} more" if len(folded) > 3 else "")
        by = max(one.difference for one in drifts)
        size = f"by up to {by:.1g} of the largest value" if by < math.inf else "beyond all measure"
        parts.append(f"{f'{state} of ' if state else ''}{names} ({size})")
    return " and ".join(parts)
