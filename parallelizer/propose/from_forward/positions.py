"""What of a model carries the sequence: entries of its batch, buffers that it reads by position, and the input that takes
positions, if it has one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from parallelizer import torch_private
from parallelizer.compiler.observe.calling import OURS_ALONE, logits_of
from parallelizer.compiler.observe.families import family_of
from parallelizer.compiler.observe.position_reads import LENGTHS, PositionSource, used_positions
from parallelizer.language.workload import Workload
from parallelizer.runtime.initialize import allocate, materialize
from parallelizer.runtime.step import forward
from parallelizer.styles.target import forward_names


@dataclass(frozen=True)
class Carriers:
    """`input` is the argument of forward that takes positions, `buffers` the dimension of each buffer read by them."""

    input: str | None = None
    buffers: dict[str, int] = field(default_factory=dict)


def carriers(
    model: nn.Module,
    workload: Workload,
    small: nn.Module | None = None,
    whole: Callable[[], nn.Module] | None = None,
) -> Carriers:
    """Runs `model`, which is on meta and is used up, on fake tensors. An argument takes positions if forward uses it and
    `small`, a small one of the kind on meta, gives the same when it is told the positions that tokens have anyway; without
    `small`, if forward makes fewer positions of its own then. `whole` builds `small` with values, if it cannot fill itself.
    """
    accepts = _same_told(small, workload, whole) if small is not None else None
    fake = torch_private.FakeTensors()
    with fake:
        allocate(model, "cpu")
    sizes = {n for t in (*model.parameters(), *model.buffers()) for n in t.shape}
    length = next((n for n in LENGTHS if n <= workload.seq_len and n not in sizes), None)
    if length is None:
        return Carriers()
    sources = _sources(model, workload, length, fake, None)
    counts = any(s.kind in ("made", "parameter") for s in sources or ())
    chosen = None
    for name in _optional(model, workload) if counts else ():
        found = _sources(model, workload, length, fake, name)
        if found is None or not any(s.kind == "given" for s in found):
            continue
        if accepts(name) if accepts is not None else _made(found) < _made(sources):
            chosen, sources = name, found
            break
    buffers = {s.name: s.dim for s in sources or () if s.kind == "buffer" and s.dim is not None}
    return Carriers(chosen, buffers)


def _same_told(
    model: nn.Module, workload: Workload, whole: Callable[[], nn.Module] | None
) -> Callable[[str], bool] | None:
    """Whether an argument changes nothing when it holds 0, 1, 2, ...; None where the model cannot be given values."""
    try:
        materialize(model, device="cpu", seed=0, whole=whole)
        model.eval()
        batch = workload.example(2, min(workload.seq_len, 8), "cpu")
        length = next(
            tensor.shape[dim]
            for name, tensor in batch.items()
            if (dim := workload.entries[name].sequence_dim()) is not None
        )
        with torch.no_grad():
            plain = logits_of(forward(model, batch))
    except Exception:  # whatever the model raises: it is then known by the positions that it makes alone
        return None

    def accepts(name: str) -> bool:
        try:
            with torch.no_grad():
                told = forward(model, {**batch, name: torch.arange(length).expand(2, -1)})
        except Exception:
            return False
        return isinstance(plain, torch.Tensor) and torch.allclose(logits_of(told), plain, atol=1e-5)

    return accepts


def _made(sources: list[PositionSource] | None) -> int:
    return sum(s.kind == "made" for s in sources or ())


def _sources(
    model: nn.Module, workload: Workload, length: int, fake: torch_private.FakeTensors, given: str | None
) -> list[PositionSource] | None:
    names = forward_names(model)
    with fake:
        batch = workload.example(2, length, "cpu")
        if given is not None:
            batch[given] = torch.zeros(2, length, dtype=torch.int64)
        if family_of(model) is not None:
            batch = {k: v for k, v in batch.items() if k not in OURS_ALONE}
        batch = {k: v for k, v in batch.items() if names is None or k in names}
        return used_positions(model, batch, length, [given] if given else [])


def _optional(model: nn.Module, workload: Workload) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.default is None and p.name not in workload.entries]
