"""Tensors: many in one kernel, trees of them, and their storage. See `parallelizer.torch_private`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Both are how torch's own debug modes are written, and wait for a public home.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as _leaves_of_any
from torch.utils._pytree import tree_map, tree_map_only

_LEAVES = frozenset(
    {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device}
)
"""Types of leaves, as far as arguments of operators have them."""


def multiply_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply many tensors in place in few kernels. `torch._foreach_mul_` is what torch's own clipping uses;
    there is no public spelling.
    """
    torch._foreach_mul_(tensors, factor)


def norms(tensors: list[torch.Tensor], dtype: torch.dtype) -> Any:
    """Euclidean norms of many tensors in few kernels, in `dtype`: `torch._foreach_norm`, as above."""
    return torch._foreach_norm(tensors, 2.0, dtype=dtype) if tensors else ()


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a tree of arguments, in order, as torch's pytree finds them. It is asked only where there are other nodes
    than tuples, lists and dictionaries: for each operator of a step this is several times as fast. Waits for a public pytree.
    """
    leaves: list[Any] = []
    _add_leaves(tree, leaves)
    return leaves


def _add_leaves(tree: Any, leaves: list[Any]) -> None:
    kind = type(tree)
    if kind in _LEAVES or issubclass(kind, torch.Tensor):
        leaves.append(tree)
    elif kind is tuple or kind is list or kind is dict:
        for part in tree.values() if kind is dict else tree:
            if type(part) in _LEAVES:
                leaves.append(part)
            else:
                _add_leaves(part, leaves)
    else:
        leaves += _leaves_of_any(tree)


def tree_map_where(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Replace the leaves of a class in a tree of arguments. Waits for a public pytree."""
    return tree_map_only(kind, function, tree)


def tree_map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Replace every leaf of a tree of arguments. Waits for a public pytree."""
    return tree_map(function, tree)


def version(tensor: torch.Tensor) -> int:
    """How many operations have changed a tensor in place. Torch's own checks of backward stand on it, and its notes on
    autograd describe it; it has no public name.
    """
    return tensor._version


def tree_map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Replace the tensors in a tree of arguments, as `tree_leaves` finds them. Waits for a public pytree."""
    return tree_map_only(torch.Tensor, function, tree)


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors over the same memory have in common, fake ones too, which have no `data_ptr`: the
    storage's own address.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def use_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """How many references a tensor and its storage have, from C++ and Python. Autograd decides by them
    whether a gradient may be written into; there is no public way to ask.
    """
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def is_made_of_tensors(kind: type) -> bool:
    """Whether tensors of a class are made of others, as DTensors are, collectives that are on their way, and torchao's float8:
    their operators call those of the others. The method is how torch.compile knows them.
    """
    return hasattr(kind, "__tensor_flatten__")


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be read, which those of meta and fake ones cannot; waits for a public question."""
    from torch._subclasses.fake_tensor import is_fake

    return not tensor.is_meta and not is_fake(tensor) and not torch.compiler.is_compiling()


def local_tensor(tensor: Any) -> torch.Tensor:
    """The local part of a DTensor itself. `to_local` hands out a view of a parameter's, which forgets what the part was
    tagged with. Waits for a `to_local` that promises the part itself.
    """
    part: torch.Tensor = tensor._local_tensor
    return part


def is_sharded(placement: Any) -> bool:
    """Whether a placement spreads elements over its axis, `_StridedShard` too, whose `is_shard` is false."""
    return not (placement.is_replicate() or placement.is_partial())
