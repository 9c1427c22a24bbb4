"""Makes a module's own attention calls context-parallel, wherever under its forward they are made.

A `TorchFunctionMode` intercepts `F.scaled_dot_product_attention` and `flex_attention`. It is active only
while the module's forward runs. It works however the function was imported and however deep it is called, and
affects no other module. Because the forward itself enters the mode, a checkpoint around the module recomputes
under it too.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from parallelizer import torch_private
from parallelizer.styles.context_parallel import flex
from parallelizer.styles.context_parallel.attention import context_attention
from parallelizer.styles.context_parallel.kernels import as_autocast
from parallelizer.styles.context_parallel.order import Order
from parallelizer.styles.context_parallel.sequence import PASS_DEVICE, UNKNOWN, CurrentOrder, GatherSequence

Tensor = torch.Tensor

_ATTENTION = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
_RESTORE = "context_parallel_restore"
_NO_FLEX = (
    "flex_attention in a compiled function cannot be seen from outside; call it as it is, or run under "
    'torch.compiler.set_stance("force_eager")'
)
_FLEX_ATTENTION = torch.ops.higher_order.flex_attention


class ContextParallelError(RuntimeError):
    """An attention that context parallelism cannot compute exactly, or none where one was promised."""


@dataclass(frozen=True)
class ContextOptions:
    """`method` is how keys and queries meet, `keep_gathered` trades memory for communication, `ulysses_degree` is over
    how many ranks ulysses-ring deals out heads: see `attention.context_attention`.
    """

    keep_gathered: bool = False
    method: str = "all-gather"
    ulysses_degree: int | None = None


def wrap(
    module: nn.Module,
    group_or_mesh: dist.ProcessGroup | DeviceMesh,
    options: ContextOptions | None = None,
    *,
    name: str | None = None,
    sequence: CurrentOrder | None = None,
) -> None:
    """From now on the attention calls under `module.forward` see the whole sequence, split over the group in the order that
    `sequence` has at each call: head-tail without one.

    Replaces `forward` on this instance, keeping its signature; `unwrap` undoes it. A group of one rank leaves
    the module as it is. `name` is what errors call the module. While the module runs, a call that cannot be
    represented exactly raises ContextParallelError, as does a forward that ends without any attention call.

    Raises ValueError for a mesh of several dimensions, a group without this rank, or a module wrapped
    already.
    """
    group = _group_of(group_or_mesh)
    if dist.get_world_size(group) == 1:
        return
    called = name or type(module).__name__
    if _restore_point(module) is not None:
        raise ValueError(f"{called} is context-parallel already")
    inside = next((path for path, m in module.named_modules() if path and _restore_point(m)), None)
    if inside is not None:
        raise ValueError(f"{inside} inside {called} is context-parallel already; give it to one of the two")
    sequence = sequence or CurrentOrder(Order(dist.get_world_size(group)))
    region = _Region(called, group, options or ContextOptions(), sequence)
    own = module.__dict__.get("forward")
    bound = module.forward
    if isinstance(bound, MethodType) and bound.__self__ is module:
        # As a method, so that a deep copy of the module calls the copy's forward and not this one's.
        forward: Callable[..., Any] = MethodType(_guarded(bound.__func__, region), module)
    else:
        forward = _guarded(bound, region)
    vars(getattr(forward, "__func__", forward))[_RESTORE] = (own,)
    module.forward = forward


def unwrap(module: nn.Module) -> None:
    """Gives the module the forward it had before `wrap`. Nothing happens to a module that is not wrapped.

    If something else replaced `forward` after `wrap`, that stays, and so does the wrapping under it.
    """
    restore = _restore_point(module)
    if restore is None:
        return
    (own,) = restore
    if own is None:
        del module.forward
    else:
        module.forward = own


def _restore_point(module: nn.Module) -> tuple[Any] | None:
    return getattr(module.__dict__.get("forward"), _RESTORE, None)


@dataclass(frozen=True)
class _Region:
    """One wrapped module: what errors call it, and where its sequence is split."""

    name: str
    group: dist.ProcessGroup
    options: ContextOptions
    sequence: CurrentOrder

    def refuse(self, what: str, remedy: str) -> NoReturn:
        raise ContextParallelError(f"{self.name}: {what}; {remedy}")


class _ThreadState(threading.local):
    """What runs in this thread. Both attributes exist from the beginning: compiled code guards on an attribute that is
    absent, and would be compiled again for the next call, which leaves it behind as None.
    """

    def __init__(self) -> None:
        self.region: _Region | None = None
        self.calls = _CallsOfForward()


class _CallsOfForward:
    """The attention calls of one forward: how many, and whether one may run without context parallelism.

    It has no names of modules: compiled code would guard on the name, and each layer would be compiled on its own.
    """

    def __init__(self) -> None:
        self.number = 0
        self.escaped = False


_running = _ThreadState()


_observers: list[Callable[[Tensor, Tensor, Tensor], None]] = []
# A plain global: what observes runs a step in a process of its own.


@contextmanager
def observed(see: Callable[[Tensor, Tensor, Tensor], None]) -> Iterator[None]:
    """Show `see` this rank's query, key and value of every attention call that context parallelism takes meanwhile, as the
    module made them. Other function modes do not see these calls.
    """
    _observers.append(see)
    try:
        yield
    finally:
        _observers.remove(see)


_asking: list[Callable[[], None]] = []


@contextmanager
def asking(see: Callable[[], None]) -> Iterator[None]:
    """Call `see` meanwhile for every call of `whole_rows`: the running module writes its attention out, and it can be
    context-parallel.
    """
    _asking.append(see)
    try:
        yield
    finally:
        _asking.remove(see)


def is_running() -> bool:
    """Whether the forward of a context-parallel module runs in this thread, which takes every attention call."""
    return _running.region is not None


def _guarded(function: Callable[..., Any], region: _Region) -> Callable[..., Any]:
    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        calls = _CallsOfForward()
        around = _running.region
        if around is not None and not torch.compiler.is_compiling():
            region.refuse(
                f"runs inside {around.name}, which is context-parallel too", "give it to one of the two"
            )
        try:
            _running.region, _running.calls = region, calls
            with _Interception(region, calls):
                result = function(*args, **kwargs)
        except Exception as error:
            _raise_refusal_from_compiler(error, region)
            raise
        finally:
            _running.region = around
        if calls.escaped:
            region.refuse(
                "attention was called in a function or a part of it that torch.compile made, where it may run without "
                "context parallelism",
                "compile this module itself or the whole model, or apply context-parallel to the compiled part",
            )
        if not calls.number:
            region.refuse(
                "its forward never called scaled_dot_product_attention or flex_attention; other attention sees local "
                "rows only",
                "choose the model's attention that calls it, or apply context-parallel to another module",
            )
        return result

    return forward


def _raise_refusal_from_compiler(error: BaseException, region: _Region) -> None:
    """A compiled flex_attention fails in some way under a function mode: by what the mode raises where the compiler finds the
    operator, or sooner. Either way it comes out as an error of the compiler's, or of what it made.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, ContextParallelError):
            return
        if f"{ContextParallelError.__name__}(" in str(link) or torch_private.of_compiled_flex(link):
            raise ContextParallelError(f"{region.name}: {_NO_FLEX}") from error
        link = link.__cause__


class _Interception(TorchFunctionMode):
    """On during one forward of one wrapped module."""

    def __init__(self, region: _Region, calls: _CallsOfForward) -> None:
        super().__init__()
        self.region = region
        self.grad_enabled = torch.is_grad_enabled()
        self.calls = calls
        self.compiled = torch.compiler.is_compiling()
        self.flex = torch_private.FlexCalls(
            self._flex, self._begin_flex, lambda rows: flex.whole_of(region, rows)
        )

    def __exit__(self, *error: Any) -> None:
        self.flex.close()
        super().__exit__(*error)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(func is attention for attention in _ATTENTION):
            if torch.compiler.is_compiling() and not self.compiled:
                # After a graph break it would continue without modes, and be wrong silently.
                self.calls.escaped = True
            self._count()
            return _attend(self.region, func, args, kwargs)
        if torch.compiler.is_compiling():
            if func is _FLEX_ATTENTION:
                raise ContextParallelError(f"{self.region.name}: {_NO_FLEX}")
        else:
            answer = self.flex(func, args, kwargs)
            if answer is not torch_private.NOT_FLEX:
                return answer
        if func is F.multi_head_attention_forward:
            with self:
                return torch_private.multi_head_attention_forward(*args, **kwargs)
        return func(*args, **kwargs)

    def _count(self) -> None:
        self.calls.number += 1
        if self.grad_enabled and not torch.is_grad_enabled():
            self.region.refuse(
                "attention was called with gradients off inside a forward that has them on, as by a "
                "reentrant checkpoint, whose recomputation would escape context parallelism",
                "checkpoint the whole module instead, with use_reentrant=False",
            )

    def _begin_flex(self, query: Tensor, key: Tensor, block_mask: BlockMask | None) -> None:
        try:
            flex.check(self.region, query, key, block_mask)
        except ValueError as error:
            raise ContextParallelError(f"{self.region.name}: {error}") from error

    def _flex(self, call: torch_private.FlexCall) -> torch_private.FlexAnswer:
        self._count()
        return _attend_flex(self.region, call)


def whole_rows(tensor: Tensor, dim: int) -> Tensor:
    """All rows along `dim` of keys or values, in their original order and without padding, for attention that a module writes
    out; inside a context-parallel module this is its attention call. Elsewhere the tensor itself. Differentiable: the
    gradients of all ranks are summed.
    """
    for see in _asking:
        see()
    region = _running.region
    if region is None:
        return tensor
    _running.calls.number += 1
    order = region.sequence.order
    gathered: Tensor = GatherSequence.apply(tensor, dim, region.group, order)
    return order.whole(gathered, dim)


@dataclass(frozen=True)
class _Call:
    """The arguments of scaled_dot_product_attention, positional and keyword as there."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = field(default=None, kw_only=True)
    enable_gqa: bool = field(default=False, kw_only=True)


def _attend(
    region: _Region, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    call = _Call(*args, **kwargs)
    for see in _observers:
        see(call.query, call.key, call.value)
    if not (call.is_causal or region.sequence.known):
        region.refuse(f"{UNKNOWN}, and its padding would be seen", PASS_DEVICE)
    tensors = (call.query, call.key, call.value)
    if any(t.is_nested for t in tensors):
        region.refuse("nested tensors are not supported", "pass dense ones")
    if isinstance(call.attn_mask, DTensor):
        region.refuse("attn_mask is a DTensor", "give it as a plain tensor, of this rank's rows")
    local, rewrap = _to_local(region, *tensors)
    q, k, v = (as_autocast(t) for t in local)
    if not q.dim() == k.dim() == v.dim() or q.dim() not in (3, 4):
        region.refuse(
            f"q, k, v of shapes {_shapes(q, k, v)} are not supported", "give all of them four dimensions"
        )
    if q.shape[:-2] != k.shape[:-2] and not (call.enable_gqa and q.dim() == 4 and q.size(0) == k.size(0)):
        func(*args, **kwargs)  # torch's own error, if it is one
        region.refuse(
            f"q, k, v of shapes {_shapes(q, k, v)} would be broadcast, which is not supported",
            "expand them, or pass enable_gqa=True for grouped heads",
        )
    flat = q.dim() == 3
    if flat:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    try:
        out = context_attention(
            q,
            k,
            v,
            group=region.group,
            is_causal=call.is_causal,
            scale=call.scale,
            attn_mask=call.attn_mask,
            method=region.options.method,
            keep_gathered=region.options.keep_gathered,
            ulysses_degree=region.options.ulysses_degree,
            dropout_p=call.dropout_p,
            dropout_share=_share_of(call.query),
            order=region.sequence.order,
        )
    except ValueError as error:
        raise ContextParallelError(f"{region.name}: {error}") from error
    return rewrap(out.squeeze(0) if flat else out)


def _attend_flex(region: _Region, call: torch_private.FlexCall) -> torch_private.FlexAnswer:
    tensors = (call.query, call.key, call.value)
    for see in _observers:
        see(*tensors)
    local, rewrap = _to_local(region, *tensors)
    q, k, v = (as_autocast(t) for t in local)
    try:
        answer = flex.attention(region, call, q, k, v, _first(call.query))
    except ValueError as error:
        raise ContextParallelError(f"{region.name}: {error}") from error
    statistics = (None if t is None else rewrap(t) for t in (answer.lse, answer.top))
    return torch_private.FlexAnswer(rewrap(answer.out), *statistics)


def _first(query: Tensor) -> tuple[int, int]:
    """Which batch entry and which head of the whole tensor this rank's part begins with."""
    first = [0, 0]
    if isinstance(query, DTensor):
        mesh = query.device_mesh
        for dim in (0, 1):
            size = query.size(dim)
            for axis, placement in enumerate(query.placements):  # from the outer axis to the inner
                if placement.is_shard(dim):
                    size //= mesh.size(axis)
                    first[dim] += mesh.get_local_rank(axis) * size
    return first[0], first[1]


def _to_local(
    region: _Region, query: Tensor, key: Tensor, value: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[[Tensor], Tensor]]:
    """The tensors that attention runs on, and what makes its output look like `query` again.

    Batch and heads may be sharded: attention treats them one by one. Anything else would need communication.
    """
    if not any(isinstance(t, DTensor) for t in (query, key, value)):
        return (query, key, value), lambda out: out
    if not (isinstance(query, DTensor) and isinstance(key, DTensor) and isinstance(value, DTensor)):
        region.refuse("q, k and v are partly DTensors, partly plain tensors", "make all of them the same")
    mesh, placements = query.device_mesh, query.placements
    kinds = " / ".join(str(t.placements) for t in (query, key, value))
    if any(t.device_mesh != mesh or t.placements != placements for t in (key, value)):
        region.refuse(f"q, k and v have different placements, {kinds}", "give them the same on the same mesh")
    # Exactly Shard: a subclass of it may order its shards differently.
    if query.dim() != 4 or any(
        not (isinstance(p, Replicate) or (type(p) is Shard and p.dim in (0, 1))) for p in placements
    ):
        region.refuse(
            f"DTensors placed {kinds} are not supported", "replicate them, or shard dimension 0 or 1"
        )
    for dim in (0, 1):
        ranks = math.prod(mesh.size(axis) for axis, p in enumerate(placements) if p.is_shard(dim))
        for tensor in (query, key, value):
            if tensor.size(dim) % ranks:
                region.refuse(
                    f"dimension {dim} of DTensor shape {tuple(tensor.shape)} is not a multiple of the "
                    f"{ranks} ranks it is sharded over",
                    "give each rank the same number",
                )
    local = (query.to_local(), key.to_local(), value.to_local())
    return local, lambda out: DTensor.from_local(out, mesh, placements, run_check=False)


def _share_of(tensor: Tensor) -> int:
    """Which part of a sharded DTensor this rank has, numbered; 0 of what is whole."""
    share = 0
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if placement.is_shard():
                share = share * tensor.device_mesh.size(axis) + tensor.device_mesh.get_local_rank(axis)
    return share


def _group_of(group_or_mesh: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    if isinstance(group_or_mesh, DeviceMesh):
        if group_or_mesh.ndim != 1:
            raise ValueError(f"a sequence is split over one axis of a mesh, not over {group_or_mesh.ndim}")
        group_or_mesh = group_or_mesh.get_group()
    if dist.get_rank(group_or_mesh) < 0:
        raise ValueError("this rank is not in the process group that the sequence is split over")
    return group_or_mesh


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors)
