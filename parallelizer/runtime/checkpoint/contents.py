"""The part of a checkpoint that a rank holds: parameters, saved buffers, the optimizer's tensors, its random
states.

model.<name>               parameters (a shared one under its first name) and saved buffers, whole, in the model's layout
optimizer.<name>.<key>     the optimizer's state of a parameter
random.<rank>.<device>     the state of a rank's generator
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.language.plan import EXPERT
from parallelizer.mesh import places
from parallelizer.runtime.fail_together import gathered
from parallelizer.runtime.held_indices import IndexRun, Share, original_shape, share
from parallelizer.runtime.state import reshard, restore_buffers, state_of
from parallelizer.runtime.state_dict import StateTensor, state_tensors

T = TypeVar("T")

MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random."


@dataclass(frozen=True)
class Held:
    """A tensor of a checkpoint as this rank has it: `local` holds the `share` of a tensor of `shape`.

    Of the ranks that hold the same share one `writes` it. A rank may hold several copies of a parameter that stages of a
    pipeline share: they have one name.
    """

    name: str
    local: torch.Tensor
    share: Share
    shape: tuple[int, ...]
    writes: bool

    def boxes(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Views of `local`, and where they begin in the whole tensor."""
        for runs, here, _ in self.share.boxes():
            yield tuple(run.original for run in runs), self.local[here]


def held_of_model(model: nn.Module) -> list[Held]:
    """Parameters and saved buffers. FSDP's are resharded, buffers are put back whole."""
    restore_buffers(model)
    reshard(model)
    distinct: dict[int, StateTensor] = {}
    for one in state_tensors(model).values():
        distinct.setdefault(id(one.tensor), one)
    return [_held(MODEL + one.first, one.tensor, one, model, one.packing) for one in distinct.values()]


def held_of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Held]:
    """The tensors that an optimizer keeps of the model's parameters.

    Raises PlanError `checkpoint-optimizer` for one that is neither a number nor of the shape of its parameter, which lies on
    several ranks: nothing would tell how it is to lie there under another plan.
    """
    found = []
    for name, one in trained(state_tensors(model), optimizer).items():
        param = one.tensor
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                if isinstance(param, DTensor) and value.dim() and value.shape != param.shape:
                    raise undealt(name, key, value.shape)
                packing = one.packing if value.shape == param.shape else None
                found.append(_held(f"{OPTIMIZER}{one.first}.{key}", value, one, model, packing))
    return found


def undealt(name: str, key: str, shape: Sequence[int], place: Span | None = None) -> PlanError:
    """The finding for a tensor of an optimizer whose placement is unknown."""
    message = f"{key} of {name} is {list(shape)}, and its placement on the ranks is not known"
    help_text = "take an optimizer whose states are numbers, or have the shape of their parameter"
    return PlanError([Diagnostic("checkpoint-optimizer", message, place, help_text)])


def about_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint says of an optimizer beside its tensors: its class, the other values that it keeps of parameters, and
    the names of those that it keeps nothing of. Collective over the ranks of the model if it is cut into stages.
    """
    values, without = {}, []
    for one in trained(state_tensors(model), optimizer).values():
        kept = optimizer.state.get(one.tensor, {})
        if not kept:
            without.append(one.first)
        if others := {k: v for k, v in kept.items() if not isinstance(v, torch.Tensor)}:
            values[one.first] = others
    every = of_stages(model, (values, without))
    return {
        "class": type(optimizer).__name__,
        "values": {name: kept for values, _ in every for name, kept in values.items()},
        "without_state": list(dict.fromkeys(name for _, without in every for name in without)),
    }


def trained(tensors: Mapping[str, StateTensor], optimizer: torch.optim.Optimizer) -> dict[str, StateTensor]:
    """Those of a model's tensors that are the optimizer's parameters, each under its first name here."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[int, tuple[str, StateTensor]] = {}
    for name, one in tensors.items():
        if id(one.tensor) in own:
            found.setdefault(id(one.tensor), (name, one))
    return dict(found.values())


def trained_everywhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """The names in a checkpoint of the parameters that the optimizers of all ranks train.

    Collective over the ranks of the model if it is cut into stages.
    """
    own = {one.first for one in trained(state_tensors(model), optimizer).values()}
    return set[str]().union(*of_stages(model, own))


def of_stages(model: nn.Module, own: T) -> list[T]:
    """What the ranks of a model have to say of their stages; of a model that is not cut, this rank's alone. Collective if it
    is cut.
    """
    state = state_of(model)
    if state is None or state.pipeline is None:
        return [own]
    return gathered(own, state.pipeline.group)


def held_random() -> list[Held]:
    """Copies of the states of this rank's generators, which each rank writes for itself."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return [
        Held(f"{RANDOM}{rank}.{device}", state, _whole(state.shape), tuple(state.shape), True)
        for device, state in states.items()
    ]


def _held(name: str, tensor: torch.Tensor, of: StateTensor, model: nn.Module, packing: Any) -> Held:
    """`tensor` belongs to a parameter or buffer, whose ranks hold it alike."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    own = share(tensor, packing)
    return Held(name, local.detach(), own, original_shape(tensor, packing), _writes(name, tensor, of, model))


def _whole(shape: torch.Size) -> Share:
    return Share(tuple((IndexRun(0, 0, size),) if size else () for size in shape))


def _writes(name: str, tensor: torch.Tensor, of: StateTensor, model: nn.Module) -> bool:
    """Whether this rank is the one of those with its share that writes it: drawn by the name, so that all have their part
    of the work.
    """
    if not dist.is_initialized():
        return True
    state = state_of(model)
    if state is not None:
        mesh = state.mesh
    elif isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
    else:
        return _drawn(name, dist.get_world_size()) == dist.get_rank()
    cut = _cut_axes(tensor)
    place, copies = 0, 1
    if mesh.get_coordinate() is None:
        return False
    for axis, (size, index) in places(mesh, of_experts=state is not None and EXPERT in cut).items():
        if axis == "pp" and of.holders is not None:
            if index not in of.holders:
                return False
            place, copies = place * len(of.holders) + of.holders.index(index), copies * len(of.holders)
        elif axis not in cut:
            place, copies = place * size + index, copies * size
    return _drawn(name, copies) == place


def _cut_axes(tensor: torch.Tensor) -> set[str]:
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    cut = [n for n, p in zip(names, tensor.placements, strict=True) if not isinstance(p, Replicate)]
    return {axis for name in cut for axis in name.split("+")}


def _drawn(name: str, number: int) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % number


def by_name(held: Iterable[Held]) -> dict[str, list[Held]]:
    """The copies of each tensor on this rank, by their names in the checkpoint."""
    found: dict[str, list[Held]] = {}
    for one in held:
        found.setdefault(one.name, []).append(one)
    return found
