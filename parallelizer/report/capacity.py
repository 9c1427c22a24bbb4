"""Whether a step fits the memory of a device, judged by the class of ranks that needs most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallelizer.diagnostics.units import size
from parallelizer.simulate.record.trace import Trace
from parallelizer.simulate.record.trace_classes import worst

NOT_COUNTED = (
    "Not counted: the CUDA context (0.5 GiB), NCCL's buffers (1 to 2.5 GiB), workspaces of cuBLAS and cuDNN "
    "(0.1 to 0.3 GiB), and the allocator's fragmentation."
)
"""What a process needs besides its tensors. The sources of these numbers are in docs/commands.md."""

KERNELS_NOT_COUNTED = (
    "Not counted: what kernels allocate while they run, in calls too large to be tried here:"
)
"""What stands before the operators whose own memory a dry run for the CPU does not know."""

COMFORTABLE = 0.9
"""The share of a device's memory up to which a peak leaves room for what is not counted."""


VERDICTS = ("fits", "tight", "does not fit")


def verdict(peak: int, total: int) -> str:
    """One of VERDICTS; `tight`: what is not counted may not fit beside the peak."""
    return VERDICTS[(peak > COMFORTABLE * total) + (peak > total)]


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
        """Whether the counted peak is not above the memory; it may be tight."""
        return self.margin >= 0

    @property
    def verdict(self) -> str:
        """`fits`, `tight` or `does not fit`."""
        return verdict(self.total - self.margin, self.total)

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
    total = int(float(hardware["memory_gib"]) * 2**30)
    peak, top = worst(trace)
    where = f" on rank {top.rank}" if top is not None and peak > trace.memory.peak else ""
    return Capacity(str(hardware.get("name") or "the device"), total, total - peak, where)
