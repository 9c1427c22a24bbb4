"""Steps on fake tensors. See `parallelizer.torch_private`."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from parallelizer.torch_private.tensors import TorchDispatchMode, tree_leaves

_GROUPED = torch.ops.aten._grouped_mm.default


class FakeTensors:
    """Under it tensors have shapes and no memory; it may be entered again. `FakeTensorMode` is documented for tools
    like ours and has no public home yet.
    """

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._modes = FakeTensorMode(allow_non_fake_inputs=True), _RealIndices()

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _RealIndices(TorchDispatchMode):
    """Lets DTensor compute indices for real under fake tensors; with `GroupedProducts`, since each mode costs time at every
    operator.

    A dimension that was flattened with a sharded one behind another lies as `_StridedShard`, which reads its
    offsets from an `arange`: a value, which a fake tensor has not. Waits for a `local_shard_size_and_offset`
    in whole numbers, as `Shard` has it.
    """

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        super().__init__()
        self._fake, self._without = FakeTensor, unset_fake_temporarily

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _GROUPED:
            return _grouped(func, args, kwargs)
        # Nearly every operator has a fake tensor first: those are let through at once.
        if args and isinstance(args[0], self._fake):
            return func(*args, **kwargs)
        fake = any(isinstance(leaf, self._fake) for leaf in tree_leaves((args, kwargs)))
        if fake or _caller("local_shard_size_and_offset", 24) is None:
            return func(*args, **kwargs)
        with self._without():
            return func(*args, **kwargs)


class GroupedProducts(TorchDispatchMode):
    """The shapes of grouped products on fake tensors and on meta in every dtype. Torch's own, `meta_grouped_mm`, knows those of
    CUDA's kernel alone, which is for bfloat16; the CPU's takes others too. Modes that watch are entered inside.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _grouped(func, args, kwargs or {}) if func is _GROUPED else func(*args, **(kwargs or {}))


def _grouped(func: Any, args: Any, kwargs: Any) -> Any:
    if args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    a, b = args[:2]
    if not (_aligned(a) and _aligned(b)):
        raise RuntimeError("strides should be multiple of 16 bytes")  # as the CPU's kernel has it
    offs = kwargs.get("offs", args[2] if len(args) > 2 else None)
    if a.dim() == b.dim() == 2:  # the groups are along the dim that is summed over
        return a.new_empty(len(offs), a.size(0), b.size(1))
    if a.dim() == b.dim():
        return a.new_empty(a.size(0), a.size(1), b.size(2))
    return a.new_empty(a.size(-2), b.size(-1))


def _aligned(factor: torch.Tensor) -> bool:
    """Whether rows, or columns, of a factor begin at multiples of 16 bytes."""
    last, row = factor.stride(-1), factor.stride(-2)
    return (max(last, row) * factor.element_size()) % 16 == 0


def _caller(name: str, depth: int) -> types.FrameType | None:
    """The innermost running frame of a function of that name, if it is not further up than `depth`."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(depth):
        if frame is None or frame.f_code.co_name == name:
            return frame
        frame = frame.f_back
    return None
