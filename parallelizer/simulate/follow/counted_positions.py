"""What takes a rank's part of the sequence for the whole of it, in a followed step under context parallelism.

Two things do. Attention outside of the modules that context parallelism was given to reads keys that differ from
rank to rank: its own rank's. And positions that every rank counts for itself, a range of the local length or the
first rows of a table, are the same on every rank and meet rows that are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer import torch_private
from parallelizer.program import Program
from parallelizer.simulate.flex import fused
from parallelizer.simulate.varying import Varying
from parallelizer.state import state_of

AXIS = "cp"
_COUNTED = "_parallelizer_counted_by"
_ROWS_OF = ("aten::slice", "aten::narrow", "aten::index_select")
"""Operators that take some rows of a tensor along one dimension."""


@dataclass(frozen=True)
class Counted:
    """Positions that are the same on every rank, made in `module`: the first rows of the model's `tensor` along
    `dim`, or, without one, numbers that the forward makes from the local length.
    """

    module: str
    tensor: str | None = None
    dim: int | None = None


@dataclass(frozen=True)
class LocalPositions:
    """Counted positions that meet a part of the sequence in `module`."""

    module: str
    counted: Counted


class Positions:
    """Follows positions that every rank counts alike, from where they are made to where they meet the sequence.

    `length` is that of a rank's part of the sequence, `held` names the model's own tensors by their storage.
    What is made by operators that read both is judged at the first that puts them together element by element,
    along a dimension of that length.
    """

    def __init__(self, length: int, held: Mapping[int, str], varying: Varying) -> None:
        self.length, self.held, self.where, self.varies = length, held, varying.where, varying.tags
        self.found: list[LocalPositions] = []

    def __call__(
        self, func: Any, args: Any, read: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Look at one operator that was run."""
        counted = [(t, c) for t in read if (c := getattr(t, _COUNTED, None)) and AXIS not in self.varies(t)]
        if any(AXIS in self.varies(t) for t in read):
            if torch.Tag.pointwise in func.tags:
                self._meet(counted, [t for t in read if AXIS in self.varies(t)])
            return
        origin = counted[0][1] if counted else self._made(func._schema.name, read, made)
        if origin is not None:
            for tensor in made:
                setattr(tensor, _COUNTED, origin)

    def _meet(self, counted: Sequence[tuple[torch.Tensor, Counted]], rows: Sequence[torch.Tensor]) -> None:
        for tensor, origin in counted:
            dims = [-i for i, size in enumerate(reversed(tensor.shape), 1) if size == self.length]
            if any(d >= -row.ndim and row.shape[d] == self.length for d in dims for row in rows):
                found = LocalPositions(self.where(), origin)
                if origin not in [f.counted for f in self.found]:
                    self.found.append(found)

    def _made(self, name: str, read: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Counted | None:
        if name == "aten::arange":
            return Counted(self.where()) if made and made[0].shape[0] == self.length else None
        if name not in _ROWS_OF or not read or not made or read[0].ndim != made[0].ndim:
            return None
        cut = [d for d, (a, b) in enumerate(zip(read[0].shape, made[0].shape, strict=True)) if a != b]
        tensor = self.held.get(torch_private.storage_key(read[0]))
        if tensor is None or len(cut) != 1 or made[0].shape[cut[0]] != self.length:
            return None
        return Counted(self.where(), tensor, cut[0])


class Attentions(TorchFunctionMode):
    """Notes the modules that call attention with keys that differ over the axis; `found` are their paths.

    Where context parallelism stands, its own mode takes the call first, and this one never sees it.
    """

    def __init__(self, varying: Varying) -> None:
        super().__init__()
        self.varying, self.where = varying, varying.where
        self.found: list[str] = []
        self.flex = torch_private.FlexCalls(fused, lambda query, key, mask: self._note(key))

    def __exit__(self, *error: Any) -> None:
        self.flex.close()
        super().__exit__(*error)

    def _note(self, key: Any) -> None:
        if (
            isinstance(key, torch.Tensor)
            and AXIS in self.varying.tags(key)
            and self.where() not in self.found
        ):
            self.found.append(self.where())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return torch_private.multi_head_attention_forward(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._note(args[1] if len(args) > 1 else kwargs.get("key"))
        answer = self.flex(func, args, kwargs)
        return func(*args, **kwargs) if answer is torch_private.NOT_FLEX else answer


@contextmanager
def watch_sequence(
    program: Program, model: nn.Module, batch: Mapping[str, torch.Tensor], varying: Varying
) -> Iterator[tuple[list[LocalPositions], list[str]]]:
    """Watch a forward under context parallelism, of a batch that is split: the positions that every rank counts, and
    the modules whose attention sees local rows. What is yielded fills while it runs.

    Where a rule splits or gathers inside the model, nothing tells from outside how the sequence lies.
    """
    split = {n: b.dim for n, b in program.plan.batch.items() if b.dim is not None and n in batch}
    inside = any(a.slot == "io" and AXIS in a.axes for a in program)
    if program.mesh.sizes[AXIS] == 1 or inside or not split:
        yield [], []
        return
    for name in program.plan.batch:
        if name in batch:
            varying.vary(batch[name], [AXIS], "")

    def swapped(*_: Any) -> None:  # the last before forward: the model's buffers are this rank's rows now
        state = state_of(model)
        for name in state.buffers.dims if state else ():
            varying.vary(model.get_buffer(name), [AXIS], "")

    handle = model.register_forward_pre_hook(swapped)
    held = {torch_private.storage_key(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
    first, dim = next(iter(split.items()))
    positions, attentions = Positions(batch[first].shape[dim], held, varying), Attentions(varying)
    try:
        with attentions, varying.shown_to(positions):
            yield positions.found, attentions.found
    finally:
        handle.remove()
