"""Tensors whose elements are made when they are read. See `parallelizer.torch_private`."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only


# A tensor that has a shape and no storage is made by `_make_wrapper_subclass`, as torch's own DTensor is. Waits for a public
# name. A subclass also defines `__tensor_flatten__` and `__tensor_unflatten__`, by which fake tensors and torch.compile see
# what it is made of.
class Elementless(torch.Tensor):
    """A tensor of a known shape, whose elements `dense` makes for every operator that reads them."""

    @classmethod
    def of_shape(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        """A tensor that has no elements yet."""
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    def dense(self) -> torch.Tensor:
        """The same tensor with its elements."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Not that of torch.Tensor, which makes every result an object of this class.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no class there
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for at, says in enumerate(func._schema.arguments):
            value = args[at] if at < len(args) else kwargs.get(says.name)
            if isinstance(value, cls) and says.alias_info is not None and says.alias_info.is_write:
                raise TypeError(
                    f"{func} writes into a {cls.__name__}, whose elements are made when they are read"
                )
        given = tree_map_only(Elementless, lambda tensor: tensor.dense(), (args, kwargs))
        return func(*given[0], **given[1])
