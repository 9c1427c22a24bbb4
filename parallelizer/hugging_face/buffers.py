"""Buffers that no checkpoint holds, such as rotary frequencies and causal masks, computed as transformers does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.diagnostics import Diagnostic, PlanError
from parallelizer.hugging_face.recognise import is_pretrained
from parallelizer.hugging_face.transformers_private import fill_own_buffers, plain
from parallelizer.plan import full_name
from parallelizer.shares import share
from parallelizer.state import state_of


@torch.no_grad()
def compute_buffers(model: nn.Module, loaded: Collection[str]) -> None:
    """Fill every buffer of an allocated model whose name is not in `loaded`. No communication.

    Each module that owns one is copied with its parameters on meta and its buffers on the CPU, so that the random
    values that transformers would draw beside them cost nothing. Raises PlanError when one stays unfilled.
    """
    state = state_of(model)
    divided = {a.module: a.divided for a in state.program if a.divided} if state else {}
    whole: Any = plain(model)
    models = {path: m for path, m in whole.named_modules() if is_pretrained(m)}
    for path, module in whole.named_modules():
        own = [name for name, _ in module.named_buffers(recurse=False) if full_name(path, name) not in loaded]
        if not own:
            continue
        inside = models[max((p for p in models if _within(path, p)), key=len)]
        twin = _twin(module, divided.get(path, {}))
        fill_own_buffers(twin, inside)
        for name in own:
            _check_filled(twin, name, full_name(path, name))
            _put(module.get_buffer(name), twin.get_buffer(name))


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _twin(module: nn.Module, divided: Any) -> nn.Module:
    twin = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.update(divided)
    twin.__dict__["_parameters"] = {
        n: None
        if p is None
        else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
        for n, p in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {n: None if b is None else _empty(b) for n, b in module._buffers.items()}
    return twin


def _empty(like: torch.Tensor) -> torch.Tensor:
    value = torch.nan if like.is_floating_point() else 0
    return torch.full(like.shape, value, dtype=like.dtype)


def _check_filled(twin: nn.Module, name: str, full: str) -> None:
    buffer = twin.get_buffer(name)
    if buffer.is_floating_point() and buffer.isnan().any():
        message = f"transformers does not compute the buffer {full}, and the checkpoint has none"
        raise PlanError([Diagnostic("weights-missing", message, None, "save it with the model")])


def _put(buffer: torch.Tensor, whole: torch.Tensor) -> None:
    if not isinstance(buffer, DTensor):
        buffer.copy_(whole)
        return
    for runs, here, _ in share(buffer, None).boxes():
        box = tuple(slice(run.original, run.original + run.count) for run in runs)
        buffer.to_local()[here].copy_(whole[box])
