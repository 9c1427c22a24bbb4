"""Buffers that no checkpoint holds, such as rotary frequencies and causal masks, computed as transformers does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.hugging_face.architecture import is_model
from parallelizer.hugging_face.transformers_private import fill_own_buffers
from parallelizer.language.plan import full_name
from parallelizer.runtime.held_indices import share
from parallelizer.runtime.state import state_of
from parallelizer.torch_private import in_written_classes, twin


@torch.no_grad()
def compute_buffers(model: nn.Module, loaded: Collection[str]) -> None:
    """Fill every buffer of an allocated model whose name is not in `loaded`. No communication.

    Each module that owns one is copied with its parameters on meta and its buffers on the CPU, so that the random
    values that transformers would draw beside them cost nothing. Raises PlanError when one stays unfilled.
    """
    state = state_of(model)
    divided = {a.module: a.divided for a in state.program if a.divided} if state else {}
    whole: Any = in_written_classes(model)
    models = {path: m for path, m in whole.named_modules() if is_model(m)}
    for path, module in whole.named_modules():
        own = [name for name, _ in module.named_buffers(recurse=False) if full_name(path, name) not in loaded]
        if not own:
            continue
        inside = models[max((p for p in models if _within(path, p)), key=len)]
        filled = _twin(module, divided.get(path, {}))
        fill_own_buffers(filled, inside)
        for name in own:
            _check_filled(filled, name, full_name(path, name))
            _put(module.get_buffer(name), filled.get_buffer(name))


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _twin(module: nn.Module, divided: Any) -> nn.Module:
    def without_memory(p: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)

    made = twin(module, type(module), parameter=without_memory, buffer=_empty)
    made.__dict__.update(divided)
    return made


def _empty(like: torch.Tensor) -> torch.Tensor:
    value = torch.nan if like.is_floating_point() else 0
    return torch.full(like.shape, value, dtype=like.dtype)


def _check_filled(module: nn.Module, name: str, full: str) -> None:
    buffer = module.get_buffer(name)
    if buffer.is_floating_point() and buffer.isnan().any():
        message = f"transformers does not compute the buffer {full}, and the checkpoint does not contain it"
        raise PlanError([Diagnostic("weights-missing", message, None, "save it with the model")])


def _put(buffer: torch.Tensor, whole: torch.Tensor) -> None:
    if not isinstance(buffer, DTensor):
        buffer.copy_(whole)
        return
    for runs, here, _ in share(buffer, None).boxes():
        box = tuple(slice(run.original, run.original + run.count) for run in runs)
        buffer.to_local()[here].copy_(whole[box])
