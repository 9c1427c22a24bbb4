"""A rehearsed rank beside what the dry run says of it, in figures and words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallelizer.diagnostics.units import size
from parallelizer.report.rows.time import range_of
from parallelizer.simulate.record.planned import CountMismatch, Planned, differences, outside_compiled
from parallelizer.simulate.rehearse.rehearse import Rehearsal
from parallelizer.simulate.time.predict import StepTime

LAUNCH_BOUND = 0.6
"""The share of a step in which a GPU runs kernels, below which the host is what the step waits for."""


UNSEEN = (
    "Not seen: sums over ranks, the order of collectives between ranks, links, and what overlaps with them. "
    "Values are those of no training."
)


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
        """`1.9 s a step (1.6 to 2.1 s) on H100-SXM, with this computation; 1.7 s as priced; waits for tp 18%`; None if the time
        of a step is not known.
        """
        time, priced = self.measured, self.predicted
        if time is None or priced is None:
            return None
        waits = sorted(((name, s / time.seconds) for name, s in time.waits.items()), key=lambda i: -i[1])
        parts = ", ".join(f"{name} {share:.0%}" for name, share in waits if share >= 0.005)
        text = f"{time.seconds:.3g} s a step ({range_of(time)}) on {time.machine}, with this computation; "
        text += f"{priced.seconds:.3g} s as priced"
        return text + (f"; waits for {parts}" if parts else "")

    @property
    def shares(self) -> list[tuple[str, float]]:
        """The share of each kind of kernel in their seconds, the largest first."""
        seconds = self.rehearsal.kernels.seconds
        total = sum(seconds.values())
        return sorted(((k, v / total) for k, v in seconds.items()), key=lambda i: -i[1]) if total else []

    @property
    def different(self) -> list[CountMismatch]:
        """Where the step's collectives are not as many as planned."""
        planned = outside_compiled(self.planned.ledger, self.rehearsal.compiled)
        return differences(planned, self.rehearsal.ledger)

    @property
    def collectives(self) -> str:
        """`428 as planned`, or what differs."""
        count = len(self.rehearsal.ledger)
        return "; ".join(map(str, self.different)) or (f"{count:,} as planned" if count else "none")

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The figures in words, each under its name; a line without a name belongs to the one before."""
        found, peak = self.rehearsal, self.rehearsal.peak
        apart = peak.requested - self.planned.peak
        more = f"{'+' if apart >= 0 else '-'}{size(abs(apart))}"
        lines = [
            ("memory", f"{size(peak.requested)} at the peak, {size(self.planned.peak)} predicted ({more})")
        ]
        if peak.allocated is not None and peak.reserved is not None:
            highest = max(peak.phases, key=lambda name: peak.phases[name]) if peak.phases else "the step"
            held = f"{size(peak.allocated)} allocated, {size(peak.reserved)} reserved; highest in {highest}"
            lines.append(("", held))
        lines.append(("time", self.time))
        if self.whole_job is not None:
            lines.append(("whole job", self.whole_job))
        if self.shares:
            shares = ", ".join(f"{kind} {share:.0%}" for kind, share in self.shares)
            lines.append(("kernels", f"{found.kernels.count:,}: {shares}"))
        if found.graphs[0]:
            anew = f", and {found.graphs[1]} in later steps" if found.graphs[1] else ", none in later steps"
            lines.append(("graphs", f"{found.graphs[0]} compiled in the first step{anew}"))
        reads = ", ".join(f"{place} ({times})" for place, times in found.host_reads.items())
        lines.append(
            ("host reads", f"{sum(found.host_reads.values())} a step{': ' + reads if reads else ''}")
        )
        lines.append(("collectives", self.collectives))
        return lines

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
                "whole_job_low": None if self.measured is None else self.measured.low,
                "whole_job_high": None if self.measured is None else self.measured.high,
                "whole_job_priced": None if self.predicted is None else self.predicted.seconds,
            },
            "kernels": {"count": found.kernels.count, "seconds": dict(found.kernels.seconds)},
            "host_reads": dict(found.host_reads),
            "graphs": {"first_step": found.graphs[0], "later_steps": found.graphs[1]},
            "collectives": {
                "planned": len(self.planned.ledger),
                "counted": len(found.ledger),
                "as_planned": not self.different,
            },
            "loss": found.loss,
            "grad_norm": found.grad_norm,
        }
