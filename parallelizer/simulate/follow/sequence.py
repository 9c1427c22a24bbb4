"""What takes a rank's part of the sequence for the whole of it, in a followed step under context parallelism.

Two things do: attention outside of the modules that context parallelism was given to, whose keys are its own rank's, and
positions that every rank counts for itself (`counted_positions.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer import torch_private
from parallelizer.compiler.observe.flex_attention import fused
from parallelizer.runtime.state import state_of
from parallelizer.simulate.follow.counted_positions import LocalPositions, Positions
from parallelizer.simulate.follow.varying import SEQUENCE_AXIS, Varying
from parallelizer.styles.application import Program


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
            and SEQUENCE_AXIS in self.varying.tags(key)
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
    inside = any(a.slot == "io" and SEQUENCE_AXIS in a.axes for a in program)
    if program.mesh.sizes[SEQUENCE_AXIS] == 1 or inside or not split:
        yield [], []
        return
    for name in program.plan.batch:
        if name in batch:
            varying.vary(batch[name], [SEQUENCE_AXIS], "")

    def swapped(*_: Any) -> None:  # the last before forward: the model's buffers are this rank's rows now
        state = state_of(model)
        for name in state.buffers.dims if state else ():
            varying.vary(model.get_buffer(name), [SEQUENCE_AXIS], "")

    handle = model.register_forward_pre_hook(swapped)
    held = {torch_private.storage_key(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
    first, dim = next(iter(split.items()))
    positions, attentions = Positions(batch[first].shape[dim], held, varying), Attentions(varying)
    try:
        with attentions, varying.shown_to(positions):
            yield positions.found, attentions.found
    finally:
        handle.remove()
