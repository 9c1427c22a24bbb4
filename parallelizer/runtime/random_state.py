"""The state of torch's default generators: saving, restoring, and using another state for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RandomState:
    """The default generators of the CPU and, unless that is the CPU too, of one device: what dropout draws from."""

    cpu: torch.Tensor
    device: torch.device
    of_device: torch.Tensor | None = None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """As they are. Nothing is waited for: a GPU's generator keeps its seed and offset on the host."""
        if device.type in ("cpu", "meta"):
            return cls(torch.get_rng_state(), device)
        return cls(torch.get_rng_state(), device, torch.get_device_module(device).get_rng_state(device))

    def put_back(self) -> None:
        """From now on the same is drawn that was drawn since."""
        torch.set_rng_state(self.cpu)
        if self.of_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.of_device, self.device)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """This state meanwhile, and the one that was there again behind it."""
        there = RandomState.now(self.device)
        self.put_back()
        try:
            yield
        finally:
            there.put_back()
