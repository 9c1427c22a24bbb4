"""One point of the search: a mesh, and the options of a preset."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from parallelizer.language.plan import EXPERT, Mesh

NO_CHECKPOINT, SELECTIVE, FULL = "none", "selective", "full"
SPLIT, WHOLE = "split", "whole"


@dataclass(frozen=True, order=True)
class Candidate:
    """A mesh and its options.

    `rows` are the sequences that a data rank computes at once: in an accumulated part, or in a microbatch of a pipeline. A part
    has `microbatches`, 1 without a pipeline. `checkpoint` is none, selective or full, over the first `share` of the equal
    layers. `stream` is split, as the plan has it, or whole on every rank of tp. `layers` has the number of layers of each stage,
    () without a pipeline.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    rows: int = 1
    accumulate: int = 1
    microbatches: int = 1
    schedule: str = ""
    stages_per_rank: int = 1
    reshard_after_forward: bool = True
    checkpoint: str = NO_CHECKPOINT
    share: float = 1.0
    stream: str = SPLIT
    method: str = ""
    layers: tuple[int, ...] = ()
    ep: int = 1

    @property
    def mesh(self) -> Mesh:
        """The sizes of the axes."""
        return Mesh(
            {
                "pp": self.pp,
                "dp_replicate": self.dp_replicate,
                "dp_shard": self.dp_shard,
                "cp": self.cp,
                "tp": self.tp,
                EXPERT: self.ep,
            }
        )

    @property
    def shards(self) -> int:
        """The ranks that FSDP shards over."""
        return self.dp_shard * self.cp

    @property
    def data_ranks(self) -> int:
        """The ranks that get other rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def trace_class(self) -> Candidate:
        """What one traced layer stands for: the candidates that differ in sizes alone, which have the same operators. It is
        traced on two shards, of the parameters of experts too.
        """
        return Candidate(
            dp_shard=2 * self.ep // math.gcd(self.ep, self.cp * self.tp),
            cp=self.cp,
            tp=self.tp,
            checkpoint=self.checkpoint,
            stream=self.stream,
            method=self.method,
            ep=self.ep,
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """What `validate` goes by: the axes that it has, not their sizes, and what it changes of the plan."""
        axes = tuple(axis for axis, size in self.mesh.every.items() if size > 1)
        return axes, self.stream, self.method, self.checkpoint

    def mesh_key(self) -> tuple[int, ...]:
        """The sizes of the axes, from the outermost, and ep."""
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp, self.ep

    def words(self) -> str:
        """The mesh as people write it, and the options that are not the usual ones."""
        axes = [
            f"{axis}{size}"
            for axis, size in (
                ("pp", self.pp), ("replicate", self.dp_replicate), ("fsdp", self.dp_shard), ("cp", self.cp),
                ("tp", self.tp),
            )
            if size > 1
        ]  # fmt: skip
        return (" x ".join(axes) or "one rank") + (f", ep{self.ep}" if self.ep > 1 else "")

    def options(self) -> str:
        """The options that differ from a preset's own."""
        said = [f"rows {self.rows}"]
        if self.pp > 1:
            stages = f" x{self.stages_per_rank}" if self.stages_per_rank > 1 else ""
            said.append(f"{self.schedule}{stages}, {self.microbatches} microbatches")
        if self.accumulate > 1:
            said.append(f"accumulate {self.accumulate}")
        if not self.reshard_after_forward:
            said.append("kept gathered")
        if self.checkpoint != NO_CHECKPOINT:
            share = f" {self.share:.0%}" if self.share < 1 else ""
            said.append(f"checkpoint {self.checkpoint}{share}")
        if self.stream != SPLIT:
            said.append("whole stream")
        if self.method:
            said.append(self.method)
        return ", ".join(said)

    def without_layers(self) -> Candidate:
        """The same before its layers are cut into stages."""
        return replace(self, layers=())
