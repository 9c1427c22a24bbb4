"""The time of a recorded step on a machine: how long, with its range, and where it goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.pipeline.replay import Replay
from parallelizer.language.plan import Mesh
from parallelizer.simulate.record.operators import Moment
from parallelizer.simulate.time.constants import FITTED, Constants
from parallelizer.simulate.time.machine import Machine, machine_of
from parallelizer.simulate.time.price import Habits, Prices, total_flops
from parallelizer.simulate.time.replay import COMPUTE, WAIT, TimeSpan, replay

STRAGGLERS = "slower devices"
"""What the computation waits for where many nodes take part, in `StepTime.waits`."""

DEVIATIONS = 1.28
"""The range holds four published runs of five: so many standard deviations of the residuals on either side."""


@dataclass(frozen=True)
class StepTime:
    """What a step takes.

    `low` and `high` bound `seconds` as the residuals of the fit do (`Constants.spread`). `compute` has seconds of the compute
    queue by kind (gemm, attention, memory), `waits` the seconds in which it stands, by the axis whose collective it waits for,
    or `host`. `modules` are seconds of both by module. `flops` are the model's on this rank, without what is computed again,
    causal attention as half, `again` those computed again; `links` are the seconds of collectives by axis. `whole_attention` are
    the operations that a causal mask hides, and `peak` is the device's rate in bfloat16. `schedule` are the actions of a
    pipeline's ranks, whose `flops` and `again` are the mean of all stages.
    """

    machine: str
    seconds: float
    low: float
    high: float
    compute: Mapping[str, float]
    waits: Mapping[str, float]
    modules: Mapping[str, float]
    links: Mapping[str, float]
    flops: int
    again: int
    whole_attention: int
    peak: float
    tokens: int
    ranks: int
    spans: tuple[TimeSpan, ...] = ()
    assumed: tuple[Diagnostic, ...] = ()
    schedule: Replay | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        return self.tokens / self.ranks / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """The share of the device's peak in bfloat16 that the model's own operations use, as PaLM counts them: all of attention,
        whether a causal mask hides half of it or not (Chowdhery et al. 2022, appendix B).
        """
        return self._share(self.flops + self.whole_attention)

    @property
    def causal_mfu(self) -> float | None:
        """The same without the half of attention that a causal mask hides."""
        return self._share(self.flops)

    def _share(self, flops: int) -> float | None:
        return flops / (self.seconds * self.peak) if self.peak and self.seconds else None


def predict(
    line: Sequence[Moment],
    mesh: Mesh,
    hardware: Mapping[str, Any],
    tokens: int,
    *,
    constants: Constants = FITTED,
    habits: Habits | None = None,
) -> StepTime | None:
    """The time of one rank's recorded step; None where nothing is known of the hardware, or there is no time line.

    `tokens` are those of the global batch.
    """
    machine = machine_of(hardware)
    if machine is None or not line:
        return None
    return predict_on(machine, line, mesh, tokens, constants=constants, habits=habits)


def predict_on(
    machine: Machine,
    line: Sequence[Moment],
    mesh: Mesh,
    tokens: int,
    *,
    constants: Constants = FITTED,
    habits: Habits | None = None,
) -> StepTime:
    """As `predict`, on a machine that has been read."""
    prices = Prices(machine, mesh, constants, habits)
    done = replay(line, prices)
    tally = Tally()
    tally.add(done.spans)
    return step_time_of(prices, tally, done.seconds, total_flops(line), tokens, done.spans)


@dataclass
class Tally:
    """Seconds summed up: `compute`, `waits`, `modules` and `links` as `StepTime` has them."""

    compute: dict[str, float] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    modules: dict[str, float] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)

    def add(self, spans: Iterable[TimeSpan], times: int = 1) -> None:
        """Count what ran, as if it had run so many times."""
        for span in spans:
            if span.queue == COMPUTE:
                self.compute[span.kind] = self.compute.get(span.kind, 0.0) + times * span.seconds
                self.modules[span.module] = self.modules.get(span.module, 0.0) + times * span.seconds
            elif span.queue != WAIT:
                self.links[span.axis] = self.links.get(span.axis, 0.0) + times * span.seconds
            if span.waited:
                self.waits[span.axis] = self.waits.get(span.axis, 0.0) + times * span.waited


def step_time_of(
    prices: Prices,
    tally: Tally,
    replayed: float,
    flops: tuple[int, int, int],
    tokens: int,
    spans: tuple[TimeSpan, ...],
) -> StepTime:
    """What a replay of `replayed` seconds says of a step. `flops` are those of `total_flops`."""
    machine, mesh, constants = prices.machine, prices.mesh, prices.constants
    nodes = mesh.world_size / machine.per_node
    waits = nodes > 1 and not machine.measured and not prices.habits.alone
    lost = replayed * constants.straggling * math.log2(nodes) if waits else 0.0
    if lost:
        tally.waits[STRAGGLERS] = lost
    seconds = replayed + lost
    whole, again, hidden = flops
    factor = math.exp(DEVIATIONS * constants.spread)
    return StepTime(
        machine.name,
        seconds,
        seconds / factor,
        seconds * factor,
        tally.compute,
        tally.waits,
        tally.modules,
        tally.links,
        whole - again,
        again,
        hidden,
        machine.peaks.get("bfloat16", 0.0) * 1e12,
        tokens,
        mesh.world_size,
        spans,
        prices.assumed(),
    )
