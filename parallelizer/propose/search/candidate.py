"""One point of the search: a mesh, and the options of a preset."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from parallelizer.language.plan import EXPERT, Mesh

NO_CHECKPOINT, SELECTIVE, FULL = "none", "selective", "full"
SPLIT, WHOLE = "split", "whole"
NO_FLOAT8 = "none"


@dataclass(frozen=True, order=True)
class Candidate:
    """A mesh and its options.

    `rows` are the sequences that a data rank computes at once: in an accumulated part, or in a microbatch of a pipeline. A part
    has `microbatches`, 1 without a pipeline. `checkpoint` is none, selective or full, over the first `share` of the equal
    layers. `stream` is split, as the plan has it, or whole on every rank of tp. `layers` has the number of layers of each stage,
    () without a pipeline. `precision` is the recipe of the modules that the plan has in float8, `none` for their own dtype, and
    empty for the plan's own recipes.
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
    precision: str = ""

    @property
    def mesh(self) -> Mesh:
        """The sizes of the axes."""
        return _mesh(*self.mesh_key())

    @property
    def shards(self) -> int:
        """The ranks that FSDP shards over."""
        return self.dp_shard * self.cp

    @property
    def data_ranks(self) -> int:
        """The ranks that get other rows."""
        return self.dp_replicate * self.dp_shard

    @functools.cached_property
    def trace_class(self) -> Candidate:
        """What one traced layer stands for: the candidates that differ in sizes alone, which have the same operators. It is
        traced on two shards, of the parameters of experts too.
        """
        return _trace_class(
            self.cp, self.tp, self.checkpoint, self.stream, self.method, self.ep, self.precision
        )

    @functools.cached_property
    def plain_class(self) -> Candidate:
        """`trace_class` without recomputation."""
        return _trace_class(
            self.cp, self.tp, NO_CHECKPOINT, self.stream, self.method, self.ep, self.precision
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """What errors go by: the axes that it has, not their sizes, and what it changes of the plan."""
        axes = tuple(axis for axis, size in self.mesh.every.items() if size > 1)
        return axes, self.stream, self.method, self.checkpoint, self.precision

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
        if self.precision:
            said.append("no float8" if self.precision == NO_FLOAT8 else f"float8 {self.precision}")
        return ", ".join(said)

    def without_layers(self) -> Candidate:
        """The same before its layers are cut into stages."""
        return replace(self, layers=())


@functools.cache
def _mesh(pp: int, replicate: int, shard: int, cp: int, tp: int, ep: int) -> Mesh:
    """One for all candidates with these sizes: a search has tens of thousands."""
    sizes = {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp}
    return Mesh({**sizes, EXPERT: ep})


@functools.cache
def _trace_class(
    cp: int, tp: int, checkpoint: str, stream: str, method: str, ep: int, precision: str
) -> Candidate:
    shards = 2 * ep // math.gcd(ep, cp * tp)
    return Candidate(
        dp_shard=shards,
        cp=cp,
        tp=tp,
        checkpoint=checkpoint,
        stream=stream,
        method=method,
        ep=ep,
        precision=precision,
    )
