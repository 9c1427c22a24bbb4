"""Copies of a rank's values on the CPU, in one block of memory that is used again for the next save.

New memory takes longer to get than to fill. For values of a GPU the block is page-locked: the GPU then copies by itself, while
the training goes on. torch's allocator of page-locked memory would round each tensor up to a power of two.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)

ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes."""


class HostCopies(Generic[Key]):
    """The copies of one rank. `page_locked` says that values come from a GPU."""

    def __init__(self, page_locked: bool) -> None:
        self.page_locked = page_locked
        self.tensors: dict[Key, torch.Tensor] = {}
        self._block: _HostBlock | None = None

    def fill(self, values: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Copy these values. Copies from a GPU are complete when its current stream has reached this point.

        Each copy has a storage of its own size. Otherwise torch would copy it again to write it.
        """
        if _forms(values) != _forms(self.tensors):
            self.tensors, self._block = {}, None  # the old memory goes before there is new memory
            self._block = _HostBlock(sum(map(_room, values.values())), self.page_locked)
            start = 0
            for key, value in values.items():
                self.tensors[key] = self._block.tensor(start, value)
                start += _room(value)
        for key, value in values.items():
            self.tensors[key].copy_(value, non_blocking=True)
        return dict(self.tensors)


class _HostBlock:
    def __init__(self, size: int, page_locked: bool) -> None:
        self.memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if page_locked:
            # A fork would else share the pages until one side writes, and the GPU might go on with those that the child keeps.
            self.memory.madvise(mmap.MADV_DONTFORK)
            address, runtime = (
                torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr(),
                torch.cuda.cudart(),
            )
            torch.cuda.check_error(runtime.cudaHostRegister(address, len(self.memory), 0))
            weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False

    def tensor(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """The memory from byte `start` on, as a tensor."""
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        numbers = torch.frombuffer(self.memory, dtype=like.dtype, count=like.numel(), offset=start)
        return numbers.view(like.shape)


def _forms(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, tuple[torch.Size, torch.dtype]]:
    return {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}


def _room(tensor: torch.Tensor) -> int:
    return math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
