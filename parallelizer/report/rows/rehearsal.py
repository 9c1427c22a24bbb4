"""A rehearsed rank beside what the dry run says of it, in figures and words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallelizer.simulate.record.planned import Planned, differences
from parallelizer.simulate.rehearse.rehearse import Rehearsal
from parallelizer.simulate.time.predict import StepTime

LAUNCH_BOUND = 0.6
"""The share of a step in which a GPU runs kernels, below which the host is what the step waits for."""


@dataclass(frozen=True)
class Compared:
    """One rank: what was planned, and what was rehearsed. With hardware, `predicted` is the time of the whole job's step, and
    `measured` the same with the computation that the rehearsal took in place of the priced one.
    """

    planned: Planned
    rehearsal: Rehearsal
    predicted: StepTime | None = None
    measured: StepTime | None = None

    @property
    def time(self) -> str:
        """`0.60 s a step on the device, 0.60 s on the host: the device waits for the host`."""
        found = self.rehearsal
        if found.device == "cpu":
            text = f"{found.device_seconds:.3g} s a step"
        else:
            waits = f", {found.kernels.busy:.0%} busy"
            launch = ": the device waits for the host" if found.kernels.busy < LAUNCH_BOUND else ""
            text = f"{found.device_seconds:.3g} s a step on the device{waits}, {found.host_seconds:.3g} s on the host{launch}"
        return text

    @property
    def whole_job(self) -> str | None:
        """`1.9 s a step on H100-SXM with this computation, 1.7 s as priced; waiting 22%: tp 18, dp_shard 4`; None if the time of
        a step is not known.
        """
        time, priced = self.measured, self.predicted
        if time is None or priced is None:
            return None
        waits = sorted(((name, s / time.seconds) for name, s in time.waits.items()), key=lambda i: -i[1])
        parts = ", ".join(f"{name} {share:.0%}" for name, share in waits if share >= 0.005)
        text = f"{time.seconds:.3g} s a step on {time.machine}, with this computation; {priced.seconds:.3g} s as priced"
        return text + (f"; waits for {parts}" if parts else "")

    @property
    def shares(self) -> list[tuple[str, float]]:
        """The share of each kind of kernel in their seconds, the largest first."""
        seconds = self.rehearsal.kernels.seconds
        total = sum(seconds.values())
        return sorted(((k, v / total) for k, v in seconds.items()), key=lambda i: -i[1]) if total else []

    @property
    def as_planned(self) -> bool | None:
        """Whether the step sent what was planned; None where compiled code hides it."""
        ledger = self.rehearsal.ledger
        return None if ledger is None else not differences(self.planned.ledger, ledger)

    @property
    def collectives(self) -> str:
        """`428 as planned`, or what differs."""
        ledger = self.rehearsal.ledger
        if ledger is None:
            return "inside compiled code, where they are not seen"
        apart = differences(self.planned.ledger, ledger)
        return "; ".join(map(str, apart)) if apart else f"{len(ledger):,} as planned" if ledger else "none"

    def as_json(self) -> dict[str, Any]:
        """The documented form, sizes in bytes."""
        found = self.rehearsal
        phases: Mapping[str, int] = found.peak.phases
        return {
            "rank": found.rank,
            "device": found.device,
            "memory": {
                "predicted": self.planned.peak,
                "requested": found.peak.requested,
                "allocated": found.peak.allocated,
                "reserved": found.peak.reserved,
                "phases": dict(phases),
            },
            "seconds": {
                "device": found.device_seconds,
                "host": found.host_seconds,
                "busy": found.kernels.busy,
                "whole_job": None if self.measured is None else self.measured.seconds,
                "whole_job_priced": None if self.predicted is None else self.predicted.seconds,
            },
            "kernels": {"count": found.kernels.count, "seconds": dict(found.kernels.seconds)},
            "host_reads": dict(found.host_reads),
            "graphs": {"first_step": found.graphs[0], "later_steps": found.graphs[1]},
            "collectives": {
                "planned": len(self.planned.ledger),
                "counted": None if found.ledger is None else len(found.ledger),
                "as_planned": self.as_planned,
            },
            "loss": found.loss,
            "grad_norm": found.grad_norm,
        }
