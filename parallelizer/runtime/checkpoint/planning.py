"""The planners for torch.distributed.checkpoint: which part of which tensor a rank writes, and which part it
reads.

torch's own planners assume that a DTensor's shard is one block of the tensor. These planners support packed
parameters, whose shard is several blocks. They omit the parts that other ranks write, so that nothing is
copied or sent for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from parallelizer.runtime.checkpoint.contents import MODEL, OPTIMIZER, RANDOM, Held


@dataclass(frozen=True)
class Piece:
    """Numbers on the CPU that belong at `offset` of the tensor `name`, of `shape`."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.name, torch.Size(self.offset))


class Writing(planner.SavePlanner):
    """Writes the pieces of each rank. Raises ValueError, on all ranks, when together they are not the whole tensors."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = {piece.index: piece for piece in pieces}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the pieces are here."""

    def create_local_plan(self) -> planner.SavePlan:
        """Our pieces."""
        items = [
            planner.WriteItem(
                index,
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    ChunkStorageMetadata(torch.Size(piece.offset), piece.values.shape),
                    TensorProperties(piece.values.dtype),
                    torch.Size(piece.shape),
                ),
            )
            for index, piece in self.pieces.items()
        ]
        return planner.SavePlan(items, planner_data={p.name: _path(p.name) for p in self.pieces.values()})

    def create_global_plan(
        self, all_plans: list[planner.SavePlan]
    ) -> tuple[list[planner.SavePlan], Metadata]:
        """On one rank, with everyone's pieces."""
        plans, metadata = create_default_global_save_plan(all_plans)
        for name, tensor in metadata.state_dict_metadata.items():
            if isinstance(tensor, TensorStorageMetadata):
                written, whole = sum(math.prod(c.sizes) for c in tensor.chunks), math.prod(tensor.size)
                if written != whole:
                    raise ValueError(f"the ranks would write {written:,} of the {whole:,} numbers of {name}")
        # How torch's tools make dictionaries of names again, `dcp_to_torch_save` for one.
        metadata.planner_data = {k: v for plan in all_plans for k, v in plan.planner_data.items()}
        return plans, metadata

    def finish_plan(self, new_plan: planner.SavePlan) -> planner.SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: planner.WriteItem) -> torch.Tensor:
        """A piece."""
        return self.pieces[write_item.index].values


class PlannedRead(planner.LoadPlanner):
    """Reads what a rank holds into the memory where it holds it."""

    def __init__(self, held: Mapping[str, Held]) -> None:
        self.boxes = {
            MetadataIndex(name, torch.Size(offset)): view
            for name, one in held.items()
            for offset, view in one.boxes()
        }
        self.names = list(held)

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keeps the metadata, which say where everything stands."""
        self.metadata = metadata

    def create_local_plan(self) -> planner.LoadPlan:
        """Our boxes. Raises ValueError when the checkpoint does not fill them."""
        items = []
        by_name: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in self.names}
        for index, view in self.boxes.items():
            by_name[index.fqn].append(ChunkStorageMetadata(index.offset or torch.Size(), view.shape))
        stored = self.metadata.state_dict_metadata if self.metadata is not None else {}
        for name, chunks in by_name.items():
            tensor = stored[name]
            if not isinstance(tensor, TensorStorageMetadata):
                raise ValueError(f"{name} is no tensor")
            reads = create_read_items_for_chunk_list(name, tensor, chunks)
            wanted, given = (
                sum(math.prod(c.sizes) for c in chunks),
                sum(math.prod(r.lengths) for r in reads),
            )
            if wanted != given:
                raise ValueError(f"the checkpoint has {given:,} of {wanted:,} numbers of {name}")
            items += reads
        return planner.LoadPlan(items)

    def create_global_plan(self, global_plan: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        """As they are."""
        return global_plan

    def finish_plan(self, central_plan: planner.LoadPlan) -> planner.LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: planner.ReadItem, value: Any) -> None:
        """There are none."""
        raise ValueError(f"{read_item.storage_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: planner.ReadItem) -> torch.Tensor:
        """Where the numbers go."""
        view = self.boxes[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: planner.ReadItem, tensor: torch.Tensor) -> None:
        """It is there already."""


def _path(name: str) -> tuple[str, ...]:
    """A name as the keys of nested dictionaries: model, parameter; optimizer, parameter, key; random, rank, device."""
    if name.startswith(MODEL):
        return MODEL[:-1], name.removeprefix(MODEL)
    first = OPTIMIZER if name.startswith(OPTIMIZER) else RANDOM
    parameter, _, key = name.removeprefix(first).rpartition(".")
    return first[:-1], parameter, key
