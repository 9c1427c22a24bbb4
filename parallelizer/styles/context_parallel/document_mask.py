"""The mask of packed documents, which has no elements as long as none is read.

The mask of a row of 131,072 tokens has 16 GiB. Attention needs to know only where documents begin, and where a rank's rows are.
So `shard_batch` gives the model a tensor of the mask's shape that knows these two. Attention takes them from it: under context
parallelism `masked.attend`, and elsewhere torch's attention function, which asks the classes of its arguments. Everything else
that reads the tensor is given the mask itself, which is then made, once, on its device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from parallelizer import torch_private
from parallelizer.styles.context_parallel import packed
from parallelizer.styles.context_parallel.dealing import document_mask
from parallelizer.styles.context_parallel.kernels import as_autocast
from parallelizer.styles.context_parallel.runs import KernelCall, are_packed, calls_of
from parallelizer.styles.context_parallel.to_device import to_device

Tensor = torch.Tensor


def made(documents: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """`dealing.document_mask` on `device`, with its elements only if documents are no stretches of neighbours."""
    if torch_private.has_values(documents):
        documents = documents.to(
            "cpu", copy=True
        )  # the mask reads them later, when their owner may have changed them
        if not are_packed(documents):
            return document_mask(to_device(documents, device), to_device(rows, device))
    return DocumentMask(documents, rows, device)


def dense(mask: Tensor) -> Tensor:
    """A mask with its elements."""
    return mask.dense() if isinstance(mask, DocumentMask) else mask


def has_elements(mask: Tensor) -> bool:
    """Whether attention must read a mask's elements, since the model may have written into them."""
    return not isinstance(mask, DocumentMask) or mask.viewed


class DocumentMask(torch_private.Elementless):
    """`document_mask(documents, rows)` on a device: documents [batch, S] on the host, positions of rows [R] or [batch, R]."""

    documents: Tensor
    rows: Tensor

    @staticmethod
    def __new__(cls, documents: Tensor, rows: Tensor, device: torch.device) -> DocumentMask:
        batch, length = documents.shape
        return cls.of_shape((batch, 1, rows.size(-1), length), torch.bool, device)

    def __init__(self, documents: Tensor, rows: Tensor, device: torch.device) -> None:
        self.documents, self.rows = documents, rows
        self._calls: list[list[KernelCall]] | None = None
        self._whole: DocumentMask | None = None
        self._dense: Tensor | None = None
        self.viewed = False
        """Whether somebody has a view of the elements, through which they can be written."""

    def dense(self) -> Tensor:
        if torch.compiler.is_compiling():  # the code makes it where it is read, and keeps nothing
            return document_mask(self.documents.to(self.device), self.rows.to(self.device))
        if self._dense is None:
            documents, rows = (to_device(t, self.device) for t in (self.documents, self.rows))
            self._dense = document_mask(documents, rows)
        return self._dense

    def calls(self) -> list[list[KernelCall]] | None:
        """What attention under the mask comes to, for each row of the batch; None where only the mask itself can be used: in
        compiled code, which would be compiled again for each batch.
        """
        if torch.compiler.is_compiling() or self.viewed:
            return None
        if self._calls is None:
            self._calls = calls_of(self.documents, self.rows, self.device)
        return self._calls

    def whole(self) -> DocumentMask:
        """The mask of all rows."""
        if self._whole is None:
            rows = torch.arange(self.documents.size(1), device=self.documents.device)
            self._whole = DocumentMask(self.documents, rows, self.device)
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and not torch.compiler.is_compiling():
            return _attend(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(args[0], DocumentMask) and not args[0].viewed:
            if (found := _without_elements(func, args[0], args[1:], kwargs)) is not None:
                return found
            if any(returned.alias_info is not None for returned in func._schema.returns):
                args[0].viewed = True
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["documents", "rows"], self.device

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], device: torch.device, size: Any, strides: Any
    ) -> DocumentMask:
        return DocumentMask(parts["documents"], parts["rows"], device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return DocumentMask, (self.documents, self.rows, self.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DocumentMask({list(self.shape)}, device={str(self.device)!r})"


def _without_elements(
    func: Any, mask: DocumentMask, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> DocumentMask | None:
    """What an operator makes of a mask that has no elements, if that has none either: a copy, or some rows of the batch."""
    aten = torch.ops.aten
    documents, rows, device = mask.documents, mask.rows, mask.device
    if func is aten._to_copy.default and kwargs.get("dtype", torch.bool) == torch.bool:
        return DocumentMask(documents, rows, torch.device(kwargs.get("device", device)))
    if func in (aten.clone.default, aten.detach.default, aten.alias.default):
        return DocumentMask(documents, rows, device)
    if func is not aten.slice.Tensor or kwargs:
        return None
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, end, step = rest + defaults[len(rest) :]
    if not start and step == 1 and (end is None or end >= mask.size(dim)):
        return DocumentMask(documents, rows, device)
    if dim == 0:  # microbatches
        return DocumentMask(func(documents, *rest), rows if rows.ndim == 1 else func(rows, *rest), device)
    return None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Torch's attention function, under a mask without elements where its arguments allow it."""
    q, k, v = query, key, value
    calls = attn_mask.calls() if isinstance(attn_mask, DocumentMask) else None
    if calls is not None and _fit(q, k, v, attn_mask, enable_gqa) and not dropout_p and not is_causal:
        q, k, v = (as_autocast(t) for t in (q, k, v))
        return packed.attend(q, k, v, calls, q.size(-1) ** -0.5 if scale is None else scale)
    rest: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return F.scaled_dot_product_attention(
        q, k, v, None if attn_mask is None else dense(attn_mask), dropout_p, **rest
    )


def _fit(q: Tensor, k: Tensor, v: Tensor, mask: Any, enable_gqa: bool) -> bool:
    """Whether these are queries of the mask's rows and keys of its columns, which torch would not broadcast."""
    if any(isinstance(t, DTensor) or t.ndim != 4 for t in (q, k, v)):
        return False
    grouped = enable_gqa and q.size(1) % k.size(1) == 0
    return (
        (q.size(2), k.size(2)) == tuple(mask.shape[2:])
        and k.shape[:3] == v.shape[:3]
        and (q.size(1) == k.size(1) or grouped)
        and q.size(0) == k.size(0)
        and mask.size(0) in (1, q.size(0))
        and q.size(3) == k.size(3)
        and q.dtype == k.dtype == v.dtype
    )
