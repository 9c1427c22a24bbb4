"""Steps on fake tensors. See `parallelizer.torch_private`."""

from __future__ import annotations

import sys
import types
from typing import Any

from parallelizer.torch_private.tensors import TorchDispatchMode, tree_leaves


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
    """Lets DTensor compute indices for real under fake tensors.

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
        # Nearly every operator has a fake tensor first: those are let through at once.
        if args and isinstance(args[0], self._fake):
            return func(*args, **kwargs)
        fake = any(isinstance(leaf, self._fake) for leaf in tree_leaves((args, kwargs)))
        if fake or _caller("local_shard_size_and_offset", 24) is None:
            return func(*args, **kwargs)
        with self._without():
            return func(*args, **kwargs)


def _caller(name: str, depth: int) -> types.FrameType | None:
    """The innermost running frame of a function of that name, if it is not further up than `depth`."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(depth):
        if frame is None or frame.f_code.co_name == name:
            return frame
        frame = frame.f_back
    return None
