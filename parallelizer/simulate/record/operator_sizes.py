"""What the price of an operator depends on, read from its arguments: its kind, its sizes, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from parallelizer.simulate.record.operators import ATTENTION, GEMM, MEMORY

COPIES = {
    "aten::_foreach_copy_": "in",  # the cast of parameters
    "fsdp::all_gather_copy_in": "in",
    "fsdp::split_with_sizes_copy": "out",
    "fsdp::chunk_cat": "in",
}
GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
"""The products of a mixture's experts in one kernel, each with rows of its own; the second is in float8."""
_GEMMS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "_scaled_mm",
    *GROUPED,
    "convolution",
    "convolution_backward",
)
_ROWS = ("embedding", "index_select", "gather", "index")
_MADE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh")
_ALIASES = ("_unsafe_view", "_wrap_tensor_autograd")
"""What fake tensors make a storage of their own for."""
_FREE = ("set_", "resize_", "_local_scalar_dense")


def way_of(func: Any) -> str:
    """How an operator is recorded: `gemm`, `attention`, `memory`, `rows` for a lookup, `own` for FSDP's copy before a gather,
    `wait`, `made` and `alias` for storages without a computation; empty for views.
    """
    namespace, name = func._schema.name.split("::")
    if name == "wait_tensor":
        return "wait"
    if name in _ALIASES:
        return "alias"
    returned = [r.alias_info for r in func._schema.returns]
    if name in _MADE or namespace in ("_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
        return "made"
    if name in _FREE or namespace in ("c10d", "prim", "profiler"):
        return ""
    if name in _GEMMS:
        return GEMM
    if "attention" in name:
        return ATTENTION
    if name in _ROWS:
        return "rows"
    if name == "all_gather_copy_in":
        return "own"
    if returned and all(alias is not None and not alias.is_write for alias in returned):
        return ""
    return MEMORY


Read = tuple[tuple[int, ...], bool, bool, str] | None


def gemm_sizes(func: Any, args: tuple[Any, ...], result: torch.Tensor) -> Read:
    """The sizes of a product of matrices. A convolution is one of patches; its backward counts as one of twice the depth. The
    products of groups are a batch whose rows, or depths for their weights' gradient, are the mean of the groups'.
    """
    name = func._schema.name.split("::")[1]
    given = [a for a in args if isinstance(a, torch.Tensor)]
    dtype = str(given[-1].dtype).removeprefix("torch.")
    if name.startswith("convolution"):
        back = name.endswith("backward")
        image, weight = given[1 if back else 0], given[2 if back else 1]
        out = given[0] if back else result
        pixels = out.numel() // max(1, out.size(1))
        return (
            (1, pixels, out.size(1), weight[0].numel() * (2 if back else 1)),
            False,
            False,
            str(image.dtype)[6:],
        )
    if name == "linear":
        left, right = given[0], given[1].t()
    elif name == "_scaled_mm":
        left, right = given[:2]
        dtype = "float8" if given[2].numel() == 1 else "float8_rowwise"  # by its scales
    elif name in GROUPED:
        left, right = given[:2]
        dtype = str(left.dtype)[6:] if name == GROUPED[0] else "float8_rowwise"
        if left.ndim != right.ndim:  # rows in groups, or columns
            groups = (left if left.ndim == 3 else right).size(0)
            m, n = left.size(-2), right.size(-1)
            shape = (-(-m // groups), n) if left.ndim == 2 else (m, -(-n // groups))
            return (groups, *shape, left.size(-1)), False, False, dtype
        if left.ndim == 2:  # depths in groups
            groups = result.size(0)
            return (groups, left.size(0), right.size(1), -(-left.size(1) // groups)), False, False, dtype
    else:
        left, right = given[-2:]
    if left.ndim < 2 or right.ndim < 2:
        return None
    batch = left.size(0) if left.ndim == 3 and right.ndim == 3 else 1
    m = left.numel() // max(1, batch * left.size(-1))
    return (batch, m, right.size(-1), left.size(-1)), False, False, dtype


def attention_sizes(func: Any, args: tuple[Any, ...], result: torch.Tensor) -> Read:
    """The sizes of attention in one kernel, [batch, heads, sequence, size] each of queries, keys and values; or [sequences,
    heads, size] of sequences one after another, which count as one.
    """
    backward = "backward" in func._schema.name
    given = [a for a in args if isinstance(a, torch.Tensor) and a.ndim >= 3]
    q, k = given[1:3] if backward else given[:2]
    q, k = (t.transpose(0, 1).unsqueeze(0) if t.ndim == 3 else t for t in (q, k))
    named = [a.name for a in func._schema.arguments]
    causal = "is_causal" in named and len(args) > (at := named.index("is_causal")) and args[at] is True
    sizes = (q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3))
    return sizes, causal, backward, str(q.dtype).removeprefix("torch.")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results, those in lists too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; of an expanded one, what is stored."""
    size = tensor.numel() * tensor.element_size()
    return size if tensor.is_contiguous() else min(size, tensor.untyped_storage().nbytes())
