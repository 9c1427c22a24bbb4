"""What a layer takes, forward and backward, at one number of rows, without FSDP's collectives."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from parallelizer.language.plan import EXPERT_SHARDS, Mesh
from parallelizer.propose.search.class_trace import ClassTrace
from parallelizer.simulate.record.operators import Issued, Moment, Operator
from parallelizer.simulate.time.constants import FITTED
from parallelizer.simulate.time.machine import Machine
from parallelizer.simulate.time.price import Prices
from parallelizer.simulate.time.replay import COMPUTE, WAIT, TimeSpan, replay

MIDDLE = 1
"""The layer of the short model that stands for all."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds. `layer` is one equal layer, forward and backward; `first` what runs before the layers and `last` what runs behind
    them, the loss too; `tail` is clipping and the optimizer, on the shards of the trace. `waited` are those in which collectives
    over tp are waited for, of a layer and of what runs outside of the layers, and `busy` all others without the host's.
    """

    layer: tuple[float, float]
    first: tuple[float, float]
    last: tuple[float, float]
    tail: float
    busy: tuple[float, float] = (0.0, 0.0)
    waited: tuple[float, float] = (0.0, 0.0)

    @property
    def ends(self) -> float:
        """What runs outside of the layers."""
        return sum(self.first) + sum(self.last)


@dataclass(frozen=True)
class UnitBytes:
    """Bytes that FSDP moves, of the whole tensor: gathered for a layer in forward and in backward, and reduced for it; and the
    same for what is outside of the layers, and for the experts of a layer, which have shards of their own.
    """

    layer: tuple[int, int, int]
    others: tuple[int, int, int]
    experts: tuple[int, int, int] = (0, 0, 0)


def layer_times(traced: ClassTrace, mesh: Mesh, machine: Machine, rows: int) -> LayerTimes:
    """The times of a class at a number of rows of a data rank; `mesh` is that of the trace."""
    prices = Prices(machine, mesh, FITTED)
    line = list(traced.at_rows(rows))
    step = [m for m in line if m.phase in ("forward", "loss", "backward") and not _over_data(m)]
    done = replay(step, prices)
    tail = replay([m for m in line if m.phase in ("clip", "optimizer") and isinstance(m, Operator)], prices)
    sums: dict[tuple[str, str], float] = {}
    before = _modules_before(traced, step)
    busy: dict[str, float] = {}
    waited: dict[str, float] = {}
    for span in done.spans:
        if span.queue not in (COMPUTE, WAIT):
            continue
        index = traced.place(span.module)
        where = "last" if span.phase == "loss" or span.module not in before else "first"
        if index is not None:
            where = "layer" if index == MIDDLE else "another"
        elif span.queue == WAIT:
            where = "another"
        phase = "backward" if span.phase == "backward" else "forward"
        key = phase, where
        sums[key] = sums.get(key, 0.0) + _seconds(span)
        inside = "layer" if where == "layer" else "ends" if where != "another" else where
        busy[inside] = busy.get(inside, 0.0) + (span.seconds if span.queue == COMPUTE else 0.0)
        if span.axis != "host":
            of_axis = waited if span.axis == "tp" else busy
            of_axis[inside] = of_axis.get(inside, 0.0) + span.waited

    def both(where: str) -> tuple[float, float]:
        return sums.get(("forward", where), 0.0), sums.get(("backward", where), 0.0)

    def apart(some: dict[str, float]) -> tuple[float, float]:
        return some.get("layer", 0.0), some.get("ends", 0.0)

    return LayerTimes(both("layer"), both("first"), both("last"), tail.seconds, apart(busy), apart(waited))


def unit_bytes(traced: ClassTrace) -> UnitBytes:
    """What FSDP gathers and reduces in the traced step."""
    layer, others, experts = [0, 0, 0], [0, 0, 0], [0, 0, 0]
    for moment in traced.line:
        if not isinstance(moment, Issued) or not moment.unit:
            continue
        entry = moment.entry
        kind = 2 if entry.kind == "reduce_scatter" else 0 if entry.phase == "forward" else 1
        index = traced.place(entry.module)
        if index is None:
            others[kind] += entry.payload_bytes
        elif index == MIDDLE:
            (experts if entry.axis == EXPERT_SHARDS else layer)[kind] += entry.payload_bytes
    return UnitBytes(*((sums[0], sums[1], sums[2]) for sums in (layer, others, experts)))


def _over_data(moment: Moment) -> bool:
    """Whether it sums over the data ranks: one number."""
    return isinstance(moment, Issued) and moment.entry.axis.partition("+")[0] in ("dp_shard", "dp_replicate")


def _modules_before(traced: ClassTrace, line: list[Moment]) -> set[str]:
    """The modules that run before the first layer. Without equal layers all do."""
    before: set[str] = set()
    for moment in line:
        if traced.place(moment.module) is not None:
            return before - {""} | {""}
        before.add(moment.module)
    return before


def _seconds(span: TimeSpan) -> float:
    return span.seconds + (span.waited if span.queue == COMPUTE else 0.0)


def halved(times: LayerTimes, share: float, other: LayerTimes) -> LayerTimes:
    """The times where a share of the layers are as in `times`, and the others as in `other`."""
    forward, backward = (share * a + (1 - share) * b for a, b in zip(times.layer, other.layer, strict=True))
    return dataclasses.replace(times, layer=(forward, backward))
