"""The price of a candidate from the traced layer of its class: seconds of a step, and the peak of memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parallelizer.compiler.observe.equal_layers import SHORT
from parallelizer.language.plan import EXPERT, EXPERT_SHARDS, FOLDED, Mesh
from parallelizer.propose.search.bounds import with_bubble
from parallelizer.propose.search.candidate import FULL, NO_CHECKPOINT, Candidate
from parallelizer.propose.search.class_trace import BY_ROWS, IN_STEP, SHARDED, ClassTrace, Spot
from parallelizer.propose.search.layer_times import LayerTimes, UnitBytes, halved, layer_times, unit_bytes
from parallelizer.propose.search.stages import (
    StageTimes,
    cut_layers,
    least_seconds,
    level_layers,
    pipeline_seconds,
    rank_peaks,
)
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.time.constants import FITTED
from parallelizer.simulate.time.machine import Machine
from parallelizer.simulate.time.price_collectives import collective_seconds

SURE = 1.1
"""An estimated peak above the limit by so much is taken not to fit, and one below it by so much to fit. Between them a dry run
decides. `python -m benchmarks.search --only exhaustive` compares estimates with dry runs.
"""

AGAIN = 0.5
"""The share of a layer's forward that a checkpoint computes again at least: all but what follows the last saved tensor."""


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of a step and the peak in bytes of the rank that needs most, of a candidate whose layers are cut."""

    candidate: Candidate
    seconds: float
    peak: int


class Estimates:
    """Prices candidates on one machine. `traces` are the traced classes, by `Candidate.trace_class`."""

    def __init__(self, machine: Machine, traces: Mapping[Candidate, ClassTrace]) -> None:
        self.machine, self.traces = machine, traces
        self._times = functools.cache(self._layer_times)
        self._units = functools.cache(lambda key: unit_bytes(self.traces[key]))
        self._seconds = functools.cache(self._collective)
        self.least = functools.cache(self._least)
        self.peak = functools.cache(self._peak_of)

    def of(self, candidate: Candidate, memory: float = math.inf) -> Estimate:
        """The price. The layers of a pipeline are cut so that it is fast; where it then takes more than `memory` bytes, so that
        its ranks hold the same. One that surely takes more in both ways has the seconds of `least`: its schedule is not replayed.
        """
        times = self._times_of(candidate)
        if candidate.pp > 1:
            return self._of_stages(candidate, times, memory)
        whole = candidate.share == 1 or candidate.checkpoint == NO_CHECKPOINT
        peak = self._peak(candidate, self.traces[candidate.trace_class])
        if not whole:
            other = self._peak(candidate, self.traces[candidate.plain_class])
            peak = round(candidate.share * peak + (1 - candidate.share) * other)
        return Estimate(candidate, self._late(candidate, self._step(candidate, times)), peak)

    def _least(self, candidate: Candidate, again: float = 0.0) -> float:
        """The seconds of `of` at least, in closed form; with a share of the layers computed `again` in backward."""
        times = self._times_of(candidate)
        if again:
            forward, backward = times.layer
            times = replace(times, layer=(forward, backward + AGAIN * again * forward))
        if candidate.pp == 1:
            return self._late(candidate, self._step(candidate, times))
        traced = self.traces[candidate.trace_class]
        cut, found, gathered, reduced = self._stages(candidate, times)
        seconds = candidate.accumulate * least_seconds(cut, found, gathered, reduced)
        return self._late(candidate, seconds + self._tail(candidate, times, traced))

    def floor(self, candidate: Candidate) -> float:
        """The seconds of a step at least, by the traced class with fewer ranks of tp and no recomputation: more of them compute
        no faster together, and wait for each other no shorter. 0 where no such class is traced.
        """
        key = next((key for key in _with_fewer_ranks(candidate.plain_class) if key in self.traces), None)
        if key is None:
            return 0.0
        times, layers = self._times(key, candidate.rows), self.traces[key].layers
        layer, ends = (
            busy * key.tp / candidate.tp + waited
            for busy, waited in zip(times.busy, times.waited, strict=True)
        )
        seconds = candidate.accumulate * candidate.microbatches * (layers * layer + ends) / candidate.pp
        return with_bubble(candidate, seconds)

    def _peak_of(self, candidate: Candidate, part: float = 1.0) -> int:
        """The peak of memory, with this part of the activations."""
        traced = self.traces[candidate.trace_class]
        if candidate.pp == 1:
            return self._peak(candidate, traced, part)
        cut = self._stages(candidate, self._times_of(candidate))[0]
        return max(self._rank_peaks(cut, range(cut.pp), part))

    def _times_of(self, candidate: Candidate) -> LayerTimes:
        times = self._times(candidate.trace_class, candidate.rows)
        if candidate.share == 1 or candidate.checkpoint == NO_CHECKPOINT:
            return times
        return halved(times, candidate.share, self._times(candidate.plain_class, candidate.rows))

    def _layer_times(self, key: Candidate, rows: int) -> LayerTimes:
        return layer_times(self.traces[key], key.mesh, self.machine, rows)

    # Seconds

    def _step(self, candidate: Candidate, times: LayerTimes) -> float:
        traced = self.traces[candidate.trace_class]
        units = self._units(candidate.trace_class)
        layer = [self._of_layer(candidate, units, kind) for kind in range(3)]
        others = [self._moved(candidate, units.others, kind) for kind in range(3)]
        if not candidate.reshard_after_forward:
            layer[1] = others[1] = 0.0
        part = traced.layers * (
            self._beside(times.layer[0], layer[0]) + self._beside(times.layer[1], layer[1] + layer[2])
        )
        # The first gather and the last reduction have nothing beside them.
        part += times.ends + min(others[0] + layer[0], 2 * layer[0] + others[0]) / 2 + others[2] / 2
        return candidate.accumulate * part + self._tail(candidate, times, traced)

    def _tail(self, candidate: Candidate, times: LayerTimes, traced: ClassTrace) -> float:
        grown = traced.parameters / max(traced.traced_parameters, 1) / candidate.pp
        return times.tail * grown * traced.shards / candidate.shards

    def _beside(self, computed: float, moved: float) -> float:
        """What a layer takes with collectives beside it."""
        if not self.machine.streams:
            return computed + moved
        slowed = computed + FITTED.contention * min(moved, computed)
        return max(moved, slowed)

    def _of_layer(self, candidate: Candidate, units: UnitBytes, kind: int) -> float:
        """The seconds of FSDP's collectives of one layer; those of experts follow behind the others."""
        seconds = self._moved(candidate, units.layer, kind)
        size, ranks = units.experts[kind], candidate.mesh.size_of(EXPERT_SHARDS)
        if not size:
            return seconds
        name = "reduce_scatter" if kind == 2 else "all_gather"
        seconds += self._seconds(candidate.mesh_key(), name, EXPERT_SHARDS, ranks, size) if ranks > 1 else 0.0
        if kind == 2 and candidate.dp_replicate > 1:
            seconds += self._seconds(
                candidate.mesh_key(), "all_reduce", "dp_replicate", candidate.dp_replicate, size // ranks
            )
        return seconds

    def _moved(self, candidate: Candidate, sizes: tuple[int, int, int], kind: int) -> float:
        """The seconds of FSDP's collectives: gathers in forward and backward, and reductions."""
        axes = [axis for axis in ("dp_shard", "cp") if candidate.mesh.sizes[axis] > 1]
        seconds = 0.0
        if axes and sizes[kind]:
            axis = FOLDED if len(axes) == 2 else axes[0]
            name = "reduce_scatter" if kind == 2 else "all_gather"
            seconds += self._seconds(candidate.mesh_key(), name, axis, candidate.shards, sizes[kind])
        if kind == 2 and candidate.dp_replicate > 1 and sizes[kind]:
            size = sizes[kind] // candidate.shards
            seconds += self._seconds(
                candidate.mesh_key(), "all_reduce", "dp_replicate", candidate.dp_replicate, size
            )
        return seconds

    def _collective(self, mesh: tuple[int, ...], kind: str, axis: str, ranks: int, payload: int) -> float:
        pp, replicate, shard, cp, tp, ep = mesh
        sizes = Mesh({"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp, EXPERT: ep})
        wire = payload * (ranks - 1) // ranks * (2 if kind == "all_reduce" else 1)
        if kind in ("send", "recv"):
            wire = payload
        entry = Collective("", kind, axis, ranks, payload, wire, "", "", None, False)
        return collective_seconds(entry, sizes, self.machine, FITTED)

    def _late(self, candidate: Candidate, seconds: float) -> float:
        """The seconds, with what the slowest of many nodes adds."""
        nodes = candidate.mesh.world_size / self.machine.per_node
        return seconds * (1 + FITTED.straggling * math.log2(nodes)) if nodes > 1 else seconds

    def _stages(
        self, candidate: Candidate, times: LayerTimes
    ) -> tuple[Candidate, list[StageTimes], tuple[float, ...], tuple[float, ...]]:
        """The candidate with its layers cut into stages, and the seconds of each: computed, gathered and reduced."""
        traced, units = self.traces[candidate.trace_class], self._units(candidate.trace_class)
        stages = candidate.pp * candidate.stages_per_rank
        layers = candidate.layers or cut_layers(
            traced.layers, stages, sum(times.layer), sum(times.first), sum(times.last)
        )
        gathered, reduced = (
            _stage_sums(
                layers, self._of_layer(candidate, units, kind), self._moved(candidate, units.others, kind)
            )
            for kind in (0, 2)
        )
        return replace(candidate, layers=layers), _stage_times(layers, times), gathered, reduced

    def _of_stages(self, candidate: Candidate, times: LayerTimes, memory: float) -> Estimate:
        traced = self.traces[candidate.trace_class]
        found = self._stages(candidate, times)
        peak = max(self._rank_peaks(found[0], range(candidate.pp)))
        if peak > memory and not candidate.layers:
            even = level_layers(found[0], self._rank_peaks)
            if even != found[0].layers:
                found = self._stages(replace(candidate, layers=even), times)
                peak = max(self._rank_peaks(found[0], range(candidate.pp)))
        cut, stages, gathered, reduced = found
        if peak > SURE * memory:
            seconds = least_seconds(cut, stages, gathered, reduced)
        else:
            seconds = pipeline_seconds(cut, stages, gathered, reduced, self._message(candidate, traced))
        seconds = candidate.accumulate * seconds + self._tail(candidate, times, traced)
        return Estimate(cut, self._late(candidate, seconds), peak)

    def knows(self, candidate: Candidate) -> bool:
        """Whether the classes are traced that its price takes."""
        keys = {candidate.trace_class}
        if candidate.share < 1 and candidate.checkpoint != NO_CHECKPOINT:
            keys.add(candidate.plain_class)
        return keys <= self.traces.keys()

    def _rank_peaks(self, cut: Candidate, ranks: Sequence[int], part: float = 1.0) -> list[int]:
        """The peak of these ranks of a pipeline whose layers are cut."""

        def of(key: Candidate) -> list[int]:
            traced = self.traces[key]
            return rank_peaks(cut, traced, self._units(key), self._message_bytes(cut, traced), ranks, part)

        peaks = of(cut.trace_class)
        if cut.share == 1 or cut.checkpoint == NO_CHECKPOINT:
            return peaks
        others = of(cut.plain_class)
        return [round(cut.share * a + (1 - cut.share) * b) for a, b in zip(peaks, others, strict=True)]

    def _message_bytes(self, candidate: Candidate, traced: ClassTrace) -> int:
        """The bytes that cross a cut: what a layer under a checkpoint keeps, its input."""
        key = _under_checkpoint(candidate.trace_class)
        kept = self.traces[key].layer if key in self.traces else traced.layer // 17
        return round(kept * candidate.rows / traced.rows)

    def _message(self, candidate: Candidate, traced: ClassTrace) -> float:
        size = self._message_bytes(candidate, traced)
        return self._seconds(candidate.mesh_key(), "send", "pp", candidate.pp, size)

    # Memory

    def _peak(self, candidate: Candidate, traced: ClassTrace, part: float = 1.0) -> int:
        key = traced_key(candidate, self.traces, traced)
        return max(at_spot(spot, candidate, traced, self._units(key), part) for spot in traced.highest)


def traced_key(candidate: Candidate, traces: Mapping[Candidate, ClassTrace], traced: ClassTrace) -> Candidate:
    """The class of a trace."""
    key = candidate.trace_class
    return key if traces[key] is traced else candidate.plain_class


def at_spot(spot: Spot, candidate: Candidate, traced: ClassTrace, units: UnitBytes, part: float = 1.0) -> int:
    """The bytes in use at a moment, with this part of the activations."""
    shards = traced.shards / candidate.shards
    grown = traced.parameters / max(traced.traced_parameters, 1)
    rows = part * candidate.rows / traced.rows
    total = 0.0
    for category, count in spot.use.items():
        if category == "gradients":
            total += shards * _gradients(spot, candidate, traced, grown)
        elif category in SHARDED or (category == "temporaries" and spot.phase not in IN_STEP):
            total += count * shards * grown
        elif category in BY_ROWS:
            total += count * rows
        elif category == "batch":
            total += count * rows * candidate.accumulate
        elif category == "gathered" and not candidate.reshard_after_forward:
            total += max(count, _kept_gathered(spot, traced, units))
        else:
            total += count
    total += spot.held * (traced.layers - SHORT if traced.run else 0) * traced.layer * rows
    return round(total)


def _gradients(spot: Spot, candidate: Candidate, traced: ClassTrace, grown: float) -> float:
    """The bytes of gradients on the shards of the trace. Those of layers that the short model lacks are there behind their
    backward, and those of all from the first accumulated part on.
    """
    if candidate.accumulate > 1:
        return grown * max(one.use["gradients"] for one in traced.spots)
    return spot.use["gradients"] * (1.0 if spot.held else grown)


def _kept_gathered(spot: Spot, traced: ClassTrace, units: UnitBytes) -> float:
    """The bytes of gathered parameters that are kept after forward: of the layers that have run, and have not run backward."""
    if spot.phase not in IN_STEP:
        return 0.0
    layers = spot.whole + 1 + spot.held * (traced.layers - SHORT if traced.run else 0)
    return min(layers, traced.layers) * (units.layer[0] + units.experts[0]) + units.others[0]


def _stage_times(layers: Sequence[int], times: LayerTimes) -> list[StageTimes]:
    of_count = {n: StageTimes(n * times.layer[0], n * times.layer[1]) for n in {*layers}}
    found = [of_count[count] for count in layers]
    for at, ends in ((0, times.first), (-1, times.last)):
        found[at] = StageTimes(found[at].forward + ends[0], found[at].backward + ends[1])
    return found


def _stage_sums(layers: Sequence[int], each: float, ends: float) -> tuple[float, ...]:
    """What `each` layer takes, by stage, with half of what the `ends` take on the first and on the last."""
    of_count = {n: n * each for n in {*layers}}
    found = [of_count[count] for count in layers]
    for at in {0, len(layers) - 1}:
        found[at] += ends / 2
    return tuple(found)


@functools.cache
def _under_checkpoint(key: Candidate) -> Candidate:
    return replace(key, checkpoint=FULL)


@functools.cache
def _with_fewer_ranks(key: Candidate) -> tuple[Candidate, ...]:
    """The class with fewer ranks of tp, the most first."""
    fewer = (tp for tp in range(key.tp - 1, 0, -1) if key.tp % tp == 0)
    return tuple(replace(key, tp=tp).trace_class for tp in fewer)
