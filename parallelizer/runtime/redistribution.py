"""How DTensor moves a tensor between placements in several hops: which collectives, and the bytes that they
send.

DTensor goes axis by axis, from the outermost axis to the innermost (`greedy`). With several axes another
order may send less: a sum before a gather sums only a part. torch has a planner that searches for the
cheapest order; it is off by default. `min-cost` takes the planner's path if there is one and if it sends less
by our count, and otherwise the greedy path.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from parallelizer import torch_private
from parallelizer.compiler.observe import phase
from parallelizer.language.plan import REDISTRIBUTE
from parallelizer.mesh import cut

PLAIN = (Replicate, Shard, Partial)
"""Placements whose costs are known here; with any other the path is the greedy one."""


@dataclass(frozen=True)
class Hop:
    """One step of a path, over one axis. A `split` is local and sends nothing. What moves a shard to another
    dimension is an `all_to_all`, as on CUDA; on CPU torch gathers the whole.
    """

    kind: str
    axis: str
    payload_bytes: int
    wire_bytes: int


Path = tuple[Hop, ...]


@dataclass(frozen=True)
class Move:
    """A tensor moved in several hops that send. `path` was taken; `cheaper` is one that sends less, if torch's
    planner knows one. `before` and `after` read `tp_outer=shard(0), tp=partial`; `module` is filled in by who knows
    what is running. `turn` is as in a ledger's entry.
    """

    phase: str
    module: str
    axes: tuple[str, ...]
    before: str
    after: str
    path: Path
    cheaper: Path | None
    turn: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True)
class _Paths:
    """torch's own descriptions of the greedy path, and of a cheaper one, with what they send."""

    greedy: Sequence[Any]
    cheaper: Sequence[Any] | None


_mode = "greedy"
_watcher: Callable[[Move], None] | None = None
# Plain globals and not context variables: backward may run in a thread of its own.


def sent(path: Path) -> int:
    """The bytes that a path sends per rank."""
    return sum(hop.wire_bytes for hop in path)


@contextmanager
def redistribute(mode: str) -> Iterator[None]:
    """A context in which DTensors of several axes are redistributed by the method `mode`, `greedy` or
    `min-cost`. All ranks must use the same mode. Raises ValueError for another mode.

    `train_step` and `evaluate` use it for a parallel model. In your own training loop, run forward and
    backward inside it.
    """
    global _mode
    if mode not in REDISTRIBUTE:
        raise ValueError(f"redistribute is one of {', '.join(REDISTRIBUTE)}, not {mode!r}")
    before, _mode = _mode, mode
    try:
        with _planned():
            yield
    finally:
        _mode = before


@contextmanager
def watched(watcher: Callable[[Move], None]) -> Iterator[None]:
    """Inside, tell the watcher of every move in several hops, as it is made."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        with _planned():
            yield
    finally:
        _watcher = before


def _planned() -> AbstractContextManager[None]:
    if _mode == "greedy" and _watcher is None:
        return nullcontext()
    return torch_private.planned_redistributions(_plan)


def _plan(source: Any, target: Any) -> Sequence[Any] | None:
    """The path for one redistribution in torch's words; None for torch's own choice."""
    if source.mesh.ndim == 1:
        return None  # one hop, which nothing can better
    paths = _paths(source, target)
    if paths is None:
        return None
    path = paths.cheaper if _mode == "min-cost" and paths.cheaper is not None else paths.greedy
    if _watcher is not None:
        _tell(_watcher, source, target, path, paths.cheaper if path is paths.greedy else None)
    return path


@functools.cache
def _paths(source: Any, target: Any) -> _Paths | None:
    """Both paths, kept as torch keeps its own; None where the costs are not known."""
    if any(type(p) not in PLAIN for p in (*source.placements, *target.placements)):
        return None
    greedy = torch_private.redistribution_path(source, target, cheapest=False)
    cheapest = torch_private.redistribution_path(source, target, cheapest=True)
    if greedy is None:
        return None
    if cheapest is None or sent(_hops(source, cheapest)) >= sent(_hops(source, greedy)):
        return _Paths(greedy, None)
    return _Paths(greedy, cheapest)


def _tell(
    watcher: Callable[[Move], None],
    source: Any,
    target: Any,
    path: Sequence[Any],
    cheaper: Sequence[Any] | None,
) -> None:
    hops = _hops(source, path)
    less = None if cheaper is None else _hops(source, cheaper)
    if less is None and sum(hop.kind != "split" for hop in hops) < 2:
        return
    before, after = (_written(s.placements, source.mesh) for s in (source, target))
    watcher(Move(phase.current(), "", _names(source.mesh), before, after, hops, less, phase.begun()))


def _hops(source: Any, path: Sequence[Any]) -> Path:
    """What is sent on a path: sizes are those of full shards, which shorter ones are padded to."""
    placements = list(source.placements)
    item = source.tensor_meta.dtype.itemsize
    names, hops = _names(source.mesh), []
    for step in path:
        index, (now, then) = step.mesh_dim, step.src_dst_placements
        held = _local_elements(source, placements)
        placements[index] = then
        ranks = source.mesh.size(index)
        if ranks == 1 or now == then:
            continue
        kind = _kind(now, then)
        payload = item * max(held, _local_elements(source, placements)) if kind != "split" else 0
        hops.append(Hop(kind, names[index], payload, wire_bytes(kind, payload, ranks)))
    return tuple(hops)


def _kind(now: Any, then: Any) -> str:
    if isinstance(now, Replicate):
        return "split"
    if isinstance(now, Partial):
        return "reduce_scatter" if isinstance(then, Shard) else "all_reduce"
    return "all_to_all" if isinstance(then, Shard) else "all_gather"


def _local_elements(spec: Any, placements: Sequence[Any]) -> int:
    shape = list(spec.shape)
    for placement, ranks in zip(placements, spec.mesh.shape, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] = cut(shape[placement.dim], ranks, 0)[1]
    return math.prod(shape)


def _names(mesh: Any) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(str(i) for i in range(mesh.ndim))


def _written(placements: Sequence[Any], mesh: Any) -> str:
    """`tp_outer=shard(0), tp=partial`, without axes of one rank."""
    names = {Replicate: "replicate", Partial: "partial"}
    return ", ".join(
        f"{axis}={names.get(type(p)) or f'shard({p.dim})'}"
        for axis, p, ranks in zip(_names(mesh), placements, mesh.shape, strict=True)
        if ranks > 1
    )


def wire_bytes(kind: str, payload: int, ranks: int) -> int:
    """What one rank of W sends, by the algorithms that move the least: (W-1)/W of the payload, an all-reduce
    twice that. Who receives sends nothing.
    """
    if kind == "recv":
        return 0
    if kind in ("send", "broadcast"):
        return payload
    share = payload * (ranks - 1) // ranks
    return 2 * share if kind == "all_reduce" else share
