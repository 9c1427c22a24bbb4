"""How DTensor moves tensors from one placement to another. See `parallelizer.torch_private`."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._api import _ToTorchTensor

from parallelizer.torch_private.fake_tensors import _caller


def redistributed_to() -> tuple[str, ...]:
    """The mesh axes over which DTensor is laying a local tensor out right now, as other shards or as terms of a sum;
    none outside a redistribution. Read from the running frames: cutting a shard out of what is whole, or has been
    gathered, is a plain `narrow` to a mode that watches operators. Terms of a sum become shards by a collective, which
    everybody sees, and are left out. Waits for a hook into redistributions; `torch.utils._debug_mode` has one that
    only prints.
    """
    frame = _caller("redistribute_local_tensor", 24)
    if frame is None:
        return ()
    here, there = frame.f_locals["current_spec"], frame.f_locals["target_spec"]
    names = there.mesh.mesh_dim_names or ()
    pairs = zip(names, here.placements, there.placements, strict=False)
    return tuple(name for name, a, b in pairs if a != b and not (a.is_partial() or b.is_replicate()))


def propagates_shapes() -> bool:
    """Whether DTensor runs an operator on fake tensors right now, to learn the shapes of its results. It keeps what it has
    learnt, but in torch 2.11 not of operators on lists of tensors. Told from the running frames: to a mode such a tensor is
    one of the step. Waits for a propagation that leaves other modes out.
    """
    return _caller("_propagate_tensor_meta_non_cached", 24) is not None


_TO_LOCAL = _ToTorchTensor.forward.__code__


def made_plain() -> DTensor | None:
    """The DTensor whose local part `to_local` hands out right now, or None. Told from the running frames, since all that
    operators show of it is a view. Waits for a hook into the border between DTensor and plain tensors.
    """
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return None
        if frame.f_code is _TO_LOCAL:
            tensor: DTensor = frame.f_locals["input"]
            return tensor
        frame = frame.f_back
    return None


@contextmanager
def planned_redistributions(plan: Callable[[Any, Any], Sequence[Any] | None]) -> Iterator[None]:
    """Inside, DTensor asks `plan(source, target)`, two specs, for the hops of every redistribution; None means
    its own choice.

    torch's switch, `use_min_cost_redistribution_plan`, is for all or nothing: under it the backward of a
    row-sharded embedding finds no path and fails, and plans made before it stay in torch's cache. Ours asks
    each time, leaves that cache alone, and leaves alone what torch estimates when it chooses how an operator
    is sharded: that question comes without the third argument, and its answers are kept. Waits for a
    public way to choose the plan of one redistribution.
    """
    from torch.distributed.tensor import _redistribute

    cached, uncached = _redistribute._gen_transform_infos, _redistribute._gen_transform_infos_non_cached
    own = functools.cache(uncached)

    def chosen(source: Any, target: Any, *more: Any) -> Any:
        return (plan(source, target) if more else None) or own(source, target, *more)

    # The second is what torch asks under fake tensors and in compilation.
    _redistribute._gen_transform_infos = chosen  # type: ignore[assignment]
    _redistribute._gen_transform_infos_non_cached = chosen  # type: ignore[assignment]
    try:
        yield
    finally:
        _redistribute._gen_transform_infos = cached
        _redistribute._gen_transform_infos_non_cached = uncached


def redistribution_path(source: Any, target: Any, *, cheapest: bool) -> Sequence[Any] | None:
    """The hops between two specs by torch's greedy planner, or by the one that looks for the cheapest; None
    where that one has no path, which it says by an AssertionError. Each hop has `mesh_dim` and
    `src_dst_placements`.
    """
    from torch.distributed.tensor import _redistribute

    planner = _redistribute.get_redistribute_planner(source.device_mesh, source.tensor_meta)
    if not cheapest:
        return planner.generate_greedy_transform_infos(source, target)
    try:
        return planner.generate_graph_based_transform_infos(source, target, source.shape)
    except (AssertionError, ValueError):
        return None
