"""What CPU kernels allocate inside themselves, where no operator shows it: a table of the operators that training consists
of, held to the allocator by a test, and for every other operator a call that is made once, on zeros, and watched.

Every figure is in bytes and for one thread, and lies beside the operator's results until it returns. A call that is too
large to be made counts as if it allocated nothing, and its operator is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallelizer import torch_private
from parallelizer.mesh import cut

Kernel = Callable[[tuple[Any, ...], Mapping[str, Any], Any], int]

UNPROMOTED = ("copy_", "masked_fill", "masked_fill_", "where")
"""Pointwise operators that read their operands as they are."""

REDUCED = (torch.bfloat16, torch.float16)

LARGEST = 2**28
"""Multiplications in the largest product that is made to see what it takes: some hundredths of a second."""

MOST_ELEMENTS = 2**22
"""Elements of the arguments and results of the largest other call that is made."""

Call = tuple[Any, ...]
"""A call without its data: the operator's name, and its arguments with shape, strides and dtype for
tensors.
"""


class CudaScratch:
    """What CUDA's kernels allocate beside their results. They read mixed dtypes and uneven sizes without copies, so only the
    backwards of softmax and of FlashAttention count. The first was seen on an H200 (docs/gpu.md), the second is in its source.
    """

    def bytes_of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
        if func is torch.ops.aten._softmax_backward_data.default:
            grad: torch.Tensor = args[0]
            return grad.numel() * grad.element_size()
        if func is torch.ops.aten._flash_attention_backward.default:
            return _flash_backward(*args[1:3])
        return 0

    def measure(self) -> None:
        """Nothing here has to be watched."""

    @property
    def uncounted(self) -> set[str]:
        """None: what CUDA's kernels allocate is named as a whole, without their names."""
        return set()


def _flash_backward(q: torch.Tensor, k: torch.Tensor) -> int:
    """The gradient of the queries [T, H, D] in float32; with grouped heads also those of keys and values for each query head."""
    size = -(-q.size(2) // 32) * 32
    grouped = 2 * k.size(0) * q.size(1) * k.size(2) * k.element_size() if q.size(1) != k.size(1) else 0
    return q.size(0) * q.size(1) * size * 4 + grouped


class Scratch:
    """What operators allocate beside their results. Calls that have to be watched count from the next `measure` on."""

    def __init__(self) -> None:
        self.watched: dict[Call, int] = {}
        self.unknown: dict[Call, Any] = {}
        self.never: set[str] = set()

    @property
    def uncounted(self) -> set[str]:
        """The operators that count as if they allocated nothing: calls that are too large to be watched, or whose results depend
        on values, and those that were not measured yet.
        """
        return self.never | {_name(func) for func in self.unknown.values()}

    def bytes_of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
        """What one call of an operator allocates beside its result."""
        name = _name(func)
        product = MULTIPLICATIONS.get(name)
        kernel = KERNELS.get(name)
        if product is not None and (kernel is None or _first_tensor(args).dtype in REDUCED):
            if product(args) <= LARGEST:
                return self._watched(func, args, kwargs)
            if kernel is None and (name not in SELDOM or _first_tensor(args).dtype in REDUCED):
                self.never.add(name)
                return 0
        if kernel is not None:
            return kernel(args, kwargs, result)
        if torch.Tag.pointwise in func.tags and name not in UNPROMOTED:
            return _operands(func, args)
        if not _may_take(func, name, args):
            return 0
        if any(tag in func.tags for tag in BY_VALUES) or _elements((args, kwargs, result)) > MOST_ELEMENTS:
            self.never |= {name} - SELDOM
            return 0
        return self._watched(func, args, kwargs)

    def _watched(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        call = (str(func), _described(args), tuple((k, _described(v)) for k, v in kwargs.items()))
        # DTensor's own questions for shapes may multiply dtypes that no kernel takes.
        if call not in self.watched and not torch_private.propagates_shapes():
            self.unknown[call] = func
        return self.watched.get(call, 0)

    def measure(self) -> None:
        """Make each call that is not known yet, with zeros. To be called outside of every mode."""
        for call, func in self.unknown.items():
            try:
                self.watched[call] = _watch(func, call)
            except (RuntimeError, IndexError, ValueError):
                # It does not take zeros: a batch without a valid row, say.
                self.watched[call] = 0
                self.never.add(_name(func))
        self.unknown.clear()


def _name(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name


@dataclass(frozen=True)
class _Dense:
    """A tensor without its data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Dense(tuple(value.shape), value.stride(), value.dtype)
    return tuple(map(_described, value)) if isinstance(value, list | tuple) else value


def _made(value: Any) -> Any:
    if isinstance(value, _Dense):
        return torch.empty_strided(value.shape, value.strides, dtype=value.dtype).zero_()
    return list(map(_made, value)) if isinstance(value, tuple) else value


def _watch(func: Any, call: Call) -> int:
    args, kwargs = _made(call[1]), {k: _made(v) for k, v in call[2]}
    results: list[Any] = []
    total, peak = 0, 0
    for change in torch_private.allocations(lambda: results.append(func(*args, **kwargs))):
        total += change
        peak = max(peak, total)
    given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
    made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(results)}
    return max(0, peak - sum(size for storage, size in made.items() if storage not in given))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in torch_private.tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _elements(values: Any) -> int:
    return sum(t.numel() for t in _tensors(values))


def _may_take(func: Any, name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operator computes from tensors: no view of them, nor the same for each tensor of a list."""
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    computes = (
        func.namespace == "aten" and not name.startswith(("_foreach_", "_fused_")) and name not in NOTHING
    )
    return computes and not views and any(True for _ in _tensors(args))


def _first_tensor(args: tuple[Any, ...]) -> torch.Tensor:
    return next(a for a in args if isinstance(a, torch.Tensor))


def _product(args: tuple[Any, ...]) -> int:
    left, right = [a for a in args if isinstance(a, torch.Tensor)][-2:]
    return left.numel() * right.size(-1)


def _scores(first: int) -> Callable[[tuple[Any, ...]], int]:
    """Of attention whose queries are argument `first` and whose keys are the next."""
    return lambda args: args[first].numel() * args[first + 1].size(2)


def _convolution(first: int) -> Callable[[tuple[Any, ...]], int]:
    """Of a convolution whose input [batch, channels, ...] is argument `first`, its weight the next, and its stride the third from
    there: the weight is multiplied at every place of the input, or at those that the stride leaves.
    """

    def count(args: tuple[Any, ...]) -> int:
        x, weight, stride, transposed = (args[first + at] for at in (0, 1, 3, 6))
        steps = 1 if transposed else math.prod(stride) ** ((x.ndim - 2) // len(stride))
        return x.numel() // max(1, x.size(1)) // steps * weight.numel() * (1 + first)

    return count


def _operands(func: Any, args: tuple[Any, ...]) -> int:
    """Operands of a pointwise operator are brought to one dtype, each in a copy; a number is made a tensor
    first.
    """
    as_tensors = [a for a, s in zip(args, func._schema.arguments, strict=False) if _is_operand(func, a, s)]
    numbers = [a for a in as_tensors if not isinstance(a, torch.Tensor)]
    tensors = [a for a in as_tensors if isinstance(a, torch.Tensor)]
    if not tensors or (not numbers and all(t.dtype == tensors[0].dtype for t in tensors)):
        return 0
    common = tensors[0].dtype
    if len(as_tensors) > 1:
        common = torch.result_type(as_tensors[0], as_tensors[1])
    copied = sum(t.numel() * common.itemsize for t in tensors if t.dtype != common)
    return copied + sum(8 + (common.itemsize if common != _dtype_of(n) else 0) for n in numbers)


def _is_operand(func: Any, value: Any, argument: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (
        str(argument.type) == "Tensor" or (func._overloadname == "Scalar" and argument.name == "other")
    )


def _dtype_of(number: int | float) -> torch.dtype:
    """How torch wraps a Python number."""
    return torch.float64 if isinstance(number, float) else torch.int64


def _rows_at_once(rows: int) -> int:
    """How many queries the attention kernels take in one go."""
    block = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(block, rows)


def _attention(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Scores, their row maxima and sums, and the output of one block of queries, in float32 at least; scores
    again in 16 bits.
    """
    q, k = args[0], args[1]
    rows, keys, size = _rows_at_once(q.size(2)), min(512, k.size(2)), q.size(3)
    wide = 8 if q.dtype == torch.float64 else 4
    return rows * (keys + 2 + size) * wide + (rows * keys * 2 if q.dtype in REDUCED else 0)


def _attention_backward(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Scores and their gradients, and a row sum; a dense copy of the output's gradient unless it is dense."""
    grad, q, k = args[0], args[1], args[2]
    rows, keys = _rows_at_once(q.size(2)), min(512, k.size(2))
    wide = 8 if q.dtype == torch.float64 else 4
    copied = 0 if grad.transpose(1, 2).is_contiguous() else grad.numel() * grad.element_size()
    return 2 * rows * keys * (wide + (2 if q.dtype in REDUCED else 0)) + rows * wide + copied


def _sum(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """The input in the dtype that sums are made in, if it is another."""
    return args[0].numel() * result.element_size() if args[0].dtype != result.dtype else 0


def _mean(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """In 16 bits the input and the result in float32; then it is divided by a number."""
    if result.dtype in REDUCED:
        return 4 * (args[0].numel() + result.numel())
    return max(_sum(args, kwargs, result), 8 + result.element_size())


def _foreach_number(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """One tensor after the other; the number anew for each."""
    tensors, number = args[:2]
    if isinstance(number, torch.Tensor) or not tensors:
        return 0
    return max(8 + (t.element_size() if t.dtype != _dtype_of(number) else 0) for t in tensors)


def _chunk_cat(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """What does not divide is padded, all at once; what has another dtype than the output is copied, one
    after the other.
    """
    tensors, dim, chunks, out = (
        *args,
        *(kwargs[k] for k in ("tensors", "dim", "num_chunks", "out")[len(args) :]),
    )
    padded = [
        cut(t.size(dim), chunks, 0)[1] * chunks * t.numel() // max(t.size(dim), 1) * t.element_size()
        for t in tensors
    ]
    uneven = sum(p for p, t in zip(padded, tensors, strict=True) if t.size(dim) % chunks)
    return uneven + max((p for p, t in zip(padded, tensors, strict=True) if t.dtype != out.dtype), default=0)


KERNELS: Mapping[str, Kernel] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "sum": _sum,
    "mean": _mean,
    "chunk_cat": _chunk_cat,
    "_foreach_add_": _foreach_number,
    "_foreach_mul_": _foreach_number,
}

NOTHING = frozenset((
    "cat", "clone", "copy_", "_to_copy", "_unsafe_view", "zeros_like", "empty_like", "ones_like", "full_like", "new_zeros",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "_assert_async", "fill_", "zero_", "set_", "resize_", "detach",
    "lift_fresh", "embedding", "slice_backward", "select_backward", "arange", "stack", "argmax", "max", "min", "amax",
    "_local_scalar_dense", "_softmax", "_log_softmax", "nll_loss_forward", "nll_loss_backward", "native_layer_norm",
    "constant_pad_nd",
))  # fmt: skip
"""Operators that allocate their results alone, whatever their arguments."""

SELDOM = frozenset((
    "_softmax_backward_data", "_log_softmax_backward_data", "embedding_dense_backward", "gather", "index", "index_put",
    "index_put_", "index_select", "index_add", "index_add_", "scatter", "scatter_", "scatter_add", "scatter_add_", "mm",
    "addmm", "bmm", "baddbmm",
))  # fmt: skip
"""Operators that copy an argument whose strides do not suit them, and else allocate nothing: large ones count so."""

BY_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
"""Of operators whose results depend on values, which zeros do not stand for."""

MULTIPLICATIONS: Mapping[str, Callable[[tuple[Any, ...]], int]] = {
    "mm": _product,
    "addmm": _product,
    "bmm": _product,
    "baddbmm": _product,
    "_scaled_dot_product_flash_attention_for_cpu": _scores(0),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _scores(1),
    "convolution": _convolution(0),
    "convolution_backward": _convolution(1),
}
"""The operators whose work is more than their tensors, and how many multiplications a call of them makes. Those with a figure
in `KERNELS` are watched in 16 bits alone.
"""
