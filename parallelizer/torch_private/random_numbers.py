"""The generators that DTensor draws from. See `parallelizer.torch_private`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _OwnGenerators:
    """What DTensor asks before a random operator, if ranks draw from their own generators: nothing is done."""

    distribute_region_enabled = False

    @contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        yield


def draw_from_own_generators() -> None:
    """From now on random operators on DTensors draw from each rank's default generator, on GPUs as on CPUs.

    Without this the first such operator on GPUs makes an `OffsetBasedRNGTracker`, which broadcasts rank 0's generator to the
    whole world, whatever the ranks were seeded with, and then reads the generator's state at each operator. torch keeps the
    tracker in a module's variable, which it makes only if there is none. `distribute_region_enabled` is the switch that
    torch's own tracker has; reaching it needs this variable too. Waits for a public way to switch the tracker off.
    """
    from torch.distributed.tensor import _random

    _random._rng_tracker = _OwnGenerators()  # type: ignore[assignment]
