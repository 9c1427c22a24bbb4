"""Copies of batch entries and of positions to a GPU, for which the host does not wait."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`tensor.to(device)`. From the host to a GPU it goes through a page-locked copy of its own, and the call returns before the
    GPU has it: work that the host then gives to the current stream comes after the copy.

    The tensor may be changed at once. Torch keeps the page-locked memory until the GPU has read it, and uses it again for the
    next copy.
    """
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not plain or torch.device(device).type != "cuda":
        return tensor.to(device)
    # Also of a tensor that is page-locked already: its owner may write into it while the GPU reads.
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor).to(device, non_blocking=True)
