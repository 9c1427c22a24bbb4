"""Numbers of the device that are copied to the host while it goes on."""

from __future__ import annotations

import torch


class Arriving:
    """A tensor on its way to the host: the copy is begun at once, and `tolist` waits for it. Nothing may write into a tensor of
    the CPU meanwhile, which is not copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._there, self._arrived = tensor.detach(), None
        if tensor.device.type not in ("cpu", "meta"):
            self._there = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._there.copy_(tensor.detach(), non_blocking=True)
            module = torch.get_device_module(tensor.device)
            self._arrived = module.Event()
            # The stream of the copy: another device than the tensor's may be the current one.
            self._arrived.record(module.current_stream(tensor.device))

    def tolist(self) -> list[int]:
        """The numbers. Waits for what the device was given before the copy, and for no more."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[int] = self._there.tolist()
        return numbers
