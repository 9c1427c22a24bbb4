"""Whether a step fits the memory of a device, judged by the class of ranks that needs most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallelizer.diagnostics.units import size
from parallelizer.simulate.record.trace import Trace
from parallelizer.simulate.record.trace_classes import worst

NOT_COUNTED = (
    "Not counted: the allocator's fragmentation, kernels' workspaces, NCCL's buffers, the CUDA context."
)


@dataclass(frozen=True)
class Capacity:
    """A device's memory and what is left of it: `margin` is below 0 where a step needs more. `where` names
    the rank that needs most, if it is another than the one that is shown.
    """

    device: str
    total: int
    margin: int
    where: str

    @property
    def fits(self) -> bool:
        return self.margin >= 0

    @property
    def verdict(self) -> str:
        """`fits` or `does not fit`."""
        return "fits" if self.fits else "does not fit"

    @property
    def rest(self) -> str:
        """`4.0 GiB (50%) to spare`, `1.0 GiB too much on rank 8`."""
        if self.fits:
            return f"{size(self.margin)} ({self.margin / self.total:.0%}) to spare{self.where}"
        return f"{size(-self.margin)} too much{self.where}"

    def __str__(self) -> str:
        """`H100, 80.0 GiB: fits, 4.0 GiB (50%) to spare`."""
        return f"{self.device}, {size(self.total)}: {self.verdict}, {self.rest}"


def capacity(trace: Trace, hardware: Mapping[str, Any]) -> Capacity | None:
    """What a step leaves of the memory of `hardware` on the rank that needs most; None if it is not known."""
    if not hardware.get("memory_gib"):
        return None
    total = int(hardware["memory_gib"]) << 30
    peak, top = worst(trace)
    where = f" on rank {top.rank}" if top is not None and peak > trace.memory.peak else ""
    return Capacity(str(hardware.get("name") or "the device"), total, total - peak, where)
