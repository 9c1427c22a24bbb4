"""The two modes that a forward is watched under: what is looked at as a whole, and every operator else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer.compiler.observe.flex_attention import fused
from parallelizer.compiler.observe.made_up_counts import made_up, without_masks
from parallelizer.compiler.observe.users_code import written_here
from parallelizer.propose.from_forward import operators
from parallelizer.propose.from_forward.atoms import ARGUMENT, FEATURE, PARAMETER, WHOLE, fresh, leaves, refuse
from parallelizer.propose.from_forward.seen import Dims, Fixed, Seen, Written
from parallelizer.propose.from_forward.stated import Stated, names_in
from parallelizer.styles.divided_sizes import SHAPE, asked_by
from parallelizer.torch_private import (
    NOT_FLEX,
    FlexAnswer,
    FlexCall,
    FlexCalls,
    TorchDispatchMode,
    tree_leaves,
)

Tensor = torch.Tensor


class Watched(operators.Watcher, Protocol):
    """Who watches, as the modes see it: `quiet` counts the calls whose inside is of no interest."""

    seen: Seen
    quiet: int

    @property
    def module(self) -> nn.Module:
        """The running module."""

    def argument(self, tensor: Tensor) -> str | None:
        """The argument of the running module that a tensor is."""

    def note(self, tensor: Tensor, dims: Dims) -> None:
        """Remember what a tensor is made of."""

    def linear(self, result: Tensor, given: Tensor, weight: Tensor) -> None:
        """A product with a weight."""

    def lookup(self, result: Tensor, ids: Tensor, weight: Tensor) -> None:
        """Rows of a table."""

    def attention(self, result: Tensor, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Any]) -> None:
        """Attention by head."""

    def operator(self, func: Any, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """One operator of aten."""

    def note_uses(self, args: Any, kwargs: Any) -> None:
        """Who reads what, and which parameters meet which tensors."""


_VIEWS = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape)
_PIECES = (
    torch.Tensor.split, torch.split, torch.Tensor.split_with_sizes, torch.Tensor.__getitem__, torch.Tensor.narrow, torch.narrow,
    torch.Tensor.unflatten,
)  # fmt: skip


_MADE = (torch.zeros, torch.ones, torch.empty, torch.full)
_MADE_LIKE = (torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty, torch.Tensor.new_full)


class Operators(TorchDispatchMode):
    def __init__(self, watcher: Watched) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = without_masks(func, args)
        counted = made_up(func, args)
        result = func(*args, **(kwargs or {})) if counted is None else counted
        if not self.watcher.quiet:
            self.watcher.operator(func, result, args, kwargs or {})
        return result


class Functions(TorchFunctionMode):
    """What is looked at as a whole, before it comes apart into operators."""

    def __init__(self, watcher: Watched) -> None:
        super().__init__()
        self.watcher = watcher
        self.flex = FlexCalls(self._flex)

    def __exit__(self, *error: Any) -> None:
        self.flex.close()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        watcher = self.watcher
        if func is F.linear:
            result = self._quiet(func, args, kwargs)
            watcher.linear(result, *_bound(args, kwargs, "input", "weight"))
            return result
        if func is F.embedding:
            result = self._quiet(func, args, kwargs)
            watcher.lookup(result, *_bound(args, kwargs, "input", "weight"))
            return result
        if func is F.scaled_dot_product_attention:
            result = self._quiet(func, args, kwargs)
            q, k, v, mask = _bound(args, kwargs, "query", "key", "value", "attn_mask")
            watcher.attention(result, q, k, v, [mask])
            return result
        if func in (F.layer_norm, F.rms_norm):
            result = self._quiet(func, args, kwargs)
            given, shape = _bound(args, kwargs, "input", "normalized_shape")
            watcher.note_uses(args, kwargs)
            dims = watcher.dims(given)
            refuse(dims[len(dims) - len(shape) :], "the forward sums over it", watcher.where)
            watcher.note(result, dims)
            return result
        answer = self.flex(func, args, kwargs)
        if answer is not NOT_FLEX:
            return answer
        result = func(*args, **kwargs)
        if func in _MADE and names_in([*args, *kwargs.values()]):
            self._note_made(result, args, kwargs)
        if func in _MADE_LIKE and names_in([*args[1:], *kwargs.values()]):
            self._note_made(result, args[1:], kwargs, ARGUMENT)
        if func is torch.Tensor.size or func == SHAPE:
            return self._stated_size(result, args, kwargs)
        if func in _VIEWS:
            self._note_sizes(result, args)
        elif func in _PIECES and (names := names_in([*args[1:], *kwargs.values()])):
            for piece in tree_leaves(result):
                if isinstance(piece, torch.Tensor):
                    self._note_cut(names, args[0], piece)
        return result

    def _quiet(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.watcher.quiet += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.watcher.quiet -= 1

    def _flex(self, call: FlexCall) -> FlexAnswer:

        self.watcher.quiet += 1
        try:
            answer = fused(call)
        finally:
            self.watcher.quiet -= 1
        result = next(t for t in tree_leaves(answer) if isinstance(t, torch.Tensor))
        self.watcher.attention(result, call.query, call.key, call.value, [])
        return answer

    def _note_made(self, result: torch.Tensor, args: Any, kwargs: Any, others: str = WHOLE) -> None:
        """A tensor of one value, of sizes that are numbers of attributes: split where these are divided. The dimensions of
        other sizes are of the kind `others`.
        """
        sizes = args[0] if args and isinstance(args[0], list | tuple) else kwargs.get("size", args)
        if not isinstance(sizes, list | tuple) or len(sizes) < result.ndim:
            return
        kinds = [PARAMETER if isinstance(n, Stated) else others for n in sizes[: result.ndim]]
        dims: Dims = [fresh(n, kind) for n, kind in zip(sizes, kinds, strict=False)]
        self.watcher.note(result, dims)
        for size, dim in zip(sizes, dims, strict=False):
            if isinstance(size, Stated):
                written = Written(self.watcher.where, dict(size.names), dim, dict(size.over))
                self.watcher.seen.written.append(written)

    def _note_cut(self, names: dict[tuple[str, str], int], whole: torch.Tensor, piece: torch.Tensor) -> None:
        """The dimension that a number of attributes has cut."""
        if piece.ndim == whole.ndim:
            dims = self.watcher.dims(piece)
            cut = [d for d, (n, m) in enumerate(zip(piece.shape, whole.shape, strict=True)) if n != m]
            self.watcher.seen.written += [Written(self.watcher.where, names, dims[d]) for d in cut]

    def _note_sizes(self, result: torch.Tensor, args: Any) -> None:
        """The sizes that a view states in numbers."""
        sizes = args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
            sizes = tuple(sizes[0])
        if len(sizes) != result.ndim or not all(isinstance(n, int) for n in sizes):
            return
        dims = self.watcher.dims(result)
        features = [
            (at - len(dims), size)
            for at, (size, dim) in enumerate(zip(sizes, dims, strict=True))
            if size > 1 and any(a.kind == FEATURE for a in leaves(dim))
        ]
        loose = tuple(at for at, size in features if not isinstance(size, Stated))
        read = tuple(at for at, size in features if any("[" in name for _, name in names_in(size)))
        if (loose or read) and (span := written_here()) is not None:
            self.watcher.seen.fixed.append(Fixed(span, tuple(map(int, sizes)), dims, loose, read))
        for size, dim in zip(sizes, dims, strict=True):
            if isinstance(size, Stated) and any(a.kind == FEATURE for a in leaves(dim)):
                self.watcher.seen.written.append(
                    Written(self.watcher.where, dict(size.names), dim, dict(size.over))
                )

    def _stated_size(self, result: Any, args: Any, kwargs: Any) -> Any:
        """What a module reads of its argument's sizes, where they count what is whole, as numbers that know it."""
        name = self.watcher.argument(args[0])
        if name is None or not asked_by(self.watcher.module):
            return result
        dims = self.watcher.dims(args[0])
        sizes = [
            Stated(n, {(self.watcher.where, f"{name}.shape[{at - len(dims)}]"): n})
            if n > 1 and dim and all(a.kind == WHOLE for a in leaves(dim))
            else n
            for at, (n, dim) in enumerate(zip(args[0].shape, dims, strict=True))
        ]
        if isinstance(result, torch.Size):
            return torch.Size(sizes)
        return sizes[args[1] if len(args) > 1 else kwargs["dim"]]


def _bound(args: Any, kwargs: Any, *names: str) -> list[Any]:
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in enumerate(names)]
