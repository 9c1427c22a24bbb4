"""The stages of a model that run on this rank, and the channels to the ranks of the stages before and behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.language.pipeline.actions import Order
from parallelizer.language.pipeline.messages import Channel, RankMessages, Traffic, forward_order, traffic
from parallelizer.language.pipeline.settings import order_of, stage_rank
from parallelizer.language.pipeline.stages import Stages
from parallelizer.language.plan import Plan
from parallelizer.runtime.pipeline.channels import open_channels
from parallelizer.runtime.pipeline.forms import Forms
from parallelizer.runtime.pipeline.microbatches import Batch, microbatches
from parallelizer.runtime.pipeline.stage_model import StageModel

Key = tuple[object, ...]
"""What tells apart batches whose tensors between stages have other shapes."""


@dataclass
class LivePipeline:
    """What a rank needs to run its stages. `models` are those by number, `ranks` the rank of each stage on `pp`, `order` the
    actions of a training step of all ranks. `groups` has the process group of each of its channels, `world` the world's
    rank of each rank on `pp`. `whole` is the model as it was before it was cut, on meta. `forms` are the forms that each
    stage was told, by the key of the batch. With a `sample` only these microbatches of each part are run, in the order in
    which all would be; a dry run does so. `elsewhere` is what a rank without the last stage adds to the sums of the losses
    and of what they weigh: nothing, except in a rehearsal, where no peer adds to them.
    """

    stages: Stages
    models: Mapping[int, StageModel]
    order: Order
    ranks: tuple[int, ...]
    rank: int
    world: tuple[int, ...]
    mesh: DeviceMesh
    groups: Mapping[Channel, dist.ProcessGroup]
    whole: nn.Module
    shared: tuple[SharedParameter, ...] = ()
    sample: tuple[int, ...] | None = None
    elsewhere: float = 0.0
    forms: dict[tuple[Key, int], Forms] = field(default_factory=dict)
    _traffic: list[tuple[Order, Traffic]] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.stages) - 1

    @property
    def is_last(self) -> bool:
        """Whether the last stage, which computes the loss, runs on this rank."""
        return self.last in self.models

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of this pipeline."""
        return self.mesh.get_group("pp")

    def training(self, batch: Mapping[str, torch.Tensor], plan: Plan) -> tuple[list[Batch], Order]:
        """The microbatches of a part of a training step, and the actions of all ranks. Raises ValueError if its rows do not
        divide.
        """
        every: list[Batch] = [*microbatches(batch, plan, self.stages.pipeline.microbatches or 1)]
        if self.sample is None:
            return every, self.order
        return [every[at] for at in self.sample], sampled(self.order, self.sample)

    def forwards(self, microbatches: int) -> Order:
        """The order of a forward without a backward."""
        return forward_order(self.ranks, microbatches)

    def messages(self, order: Order, *, forwards: bool = False) -> RankMessages:
        """What this rank does with its messages in a pass through an order; `forwards`: it is one of `forwards`."""
        if not any(order is known for known, _ in self._traffic):
            self._traffic[:] = [*self._traffic[-1:], (order, traffic(order, self.rank, self.ranks))]
        found = next(one for known, one in self._traffic if known is order)
        return RankMessages(found, self.ranks, len(self.order) if forwards else None)

    @property
    def copies(self) -> list[SharedParameter]:
        """The copies on this rank of parameters that another stage owns."""
        return [one for one in self.shared if not one.owner]

    @property
    def renamed(self) -> list[SharedParameter]:
        """The copies on this rank that have another name than the parameter has in the whole model."""
        return [one for one in self.shared if one.here != one.name]

    def holders(self, name: str, *, buffer: bool = False) -> tuple[int, ...]:
        """The ranks on `pp` that hold a parameter or a buffer, in the order of their first stage that does."""
        return tuple(dict.fromkeys(self.ranks[stage] for stage in self.stages.holding(name, buffer=buffer)))


def sampled(order: Order, sample: tuple[int, ...]) -> Order:
    """The actions for some microbatches, which are counted anew."""
    number = {microbatch: at for at, microbatch in enumerate(sample)}
    return tuple(
        tuple(replace(a, microbatch=number[a.microbatch]) for a in actions if a.microbatch in number)
        for actions in order
    )


@dataclass(frozen=True)
class SharedParameter:
    """One of the copies that several stages have of a parameter. It is called `name` in the whole model and `here` on
    this stage. The `owner` is the first stage that has one: its copy is in checkpoints, and counts in the norm of the
    gradients. `group` are the ranks with copies, None if it is one rank. The module of `name` makes the initial values, also
    where no stage calls it.
    """

    name: str
    here: str
    owner: bool
    group: dist.ProcessGroup | None


def pipeline_of(
    stages: Stages,
    models: Mapping[int, StageModel],
    mesh: DeviceMesh,
    whole: nn.Module,
    shared: Iterable[SharedParameter],
) -> LivePipeline:
    """The pipeline of this rank. Collective over its ranks: it makes process groups."""
    ranks = mesh.size(mesh.mesh_dim_names.index("pp")) if mesh.mesh_dim_names else 1
    order = order_of(stages.pipeline, ranks)
    placed = stage_rank(stages.pipeline, ranks)
    mine = dist.get_process_group_ranks(mesh.get_group("pp"))
    return LivePipeline(
        stages,
        models,
        order,
        placed,
        mesh.get_local_rank("pp"),
        tuple(mine),
        mesh,
        open_channels(placed, mine, mesh.get_local_rank("pp"), torch.device(mesh.device_type)),
        whole,
        tuple(shared),
    )


def key_of(batch: Mapping[str, torch.Tensor]) -> Key:
    """What the shapes between stages depend on."""
    shapes = tuple((name, tuple(t.shape), str(t.dtype)) for name, t in sorted(batch.items()))
    return (torch.is_grad_enabled(), *shapes)
