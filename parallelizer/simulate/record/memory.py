"""Every allocation of a step: what lives when, of which kind, and where the peak lies.

Storages are followed from the operator that made them to their end. FSDP resizes the storages of gathered
parameters without an operator; those few are looked at before each operator, so that they are freed before
anything else is allocated.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallelizer import torch_private
from parallelizer.compiler.observe import phase
from parallelizer.compiler.observe.running_module import Running
from parallelizer.runtime.pipeline.channels import moving
from parallelizer.simulate.record.kernel_scratch import CudaScratch, Scratch
from parallelizer.simulate.record.stretch import extended
from parallelizer.simulate.trace_failed import Reached
from parallelizer.torch_private import TorchDispatchMode, tree_leaves

CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "unsharded",
    "optimizer",
    "activations",
    "gathered",
    "collectives",
    "received",
    "temporaries",
    "batch",
)

ALIASING = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators that hand their input on; under fake tensors they make a tensor of their own."""


ALONE = (4, 2)
"""The use counts, seen from inside the innermost mode, of a gradient that autograd alone holds."""

_WRAPPERS = ("/_compile.py", "/eval_frame.py")
"""What torch puts around `__torch_dispatch__`."""


@dataclass
class Allocation:
    """One allocation, held by one storage or by several that a fake operator made out of one. Its category
    may become known only after it was made.
    """

    bytes: int
    category: str
    phase: str
    holders: int = 1


@dataclass(frozen=True)
class Event:
    """A change of the memory in use: `block` grew by `delta` bytes while `module` ran."""

    delta: int
    block: Allocation
    phase: str
    module: str


@dataclass
class _Tracked:
    block: Allocation
    reference: Any = None


_DEVICE = torch.ops.prim.device.default
"""Asked half as often as operators run. The tensor itself knows it, so no other mode is asked."""

_ADDING = (torch.ops.aten.add.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_add.default)
"""What autograd itself calls in backward, the last two of an index and of `index_select`."""


class MemoryTracker(TorchDispatchMode):
    """Follows storages of one device type while it is active; `adopt` those that exist before. With `learns_shapes` DTensor may
    trace operators for the first time meanwhile, on tensors that are never allocated. `device`, cpu or
    cuda, selects what kernels allocate inside themselves.
    """

    def __init__(self, running: Running, *, learns_shapes: bool = False, device: str = "cpu") -> None:
        super().__init__()
        self.running, self.learns_shapes = running, learns_shapes
        self.events: list[Event] = []
        self.live: dict[int, _Tracked] = {}
        self.resizable: dict[int, tuple[Any, _Tracked]] = {}
        self.scratch = CudaScratch() if device == "cuda" else Scratch()
        self.reached = Reached()
        self.dispatched: Callable[[], None] = lambda: None
        """Called for each operator on tensors that are made of others, DTensors say. Modes around this one do not see it."""

    def adopt(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count tensors as of a category: new ones as allocated now, known ones relabelled."""
        for tensor in tensors:
            for local in _locals(tensor):
                self._see(local, category, relabel=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(torch_private.is_made_of_tensors, types)):
            self.dispatched()
            return NotImplemented
        self._poll()
        if func is _DEVICE and types:
            return types[0].__torch_dispatch__(func, types, args)
        kwargs = kwargs or {}
        if func.namespace not in ("prim", "profiler"):  # nothing that a model asks for
            self.reached = Reached(str(func), False, phase.current(), self.running.current)
        result = func(*args, **kwargs)
        self.reached.done = True
        name = func._schema.name.split("::")[1]
        if (name == "empty_strided" or self.learns_shapes) and torch_private.propagates_shapes():
            return result  # of tensors that are never allocated
        if name in ALIASING or self._accumulates(func, args, kwargs):
            self._alias(args[0], result)
            return result
        if name.startswith(("all_gather_copy_in", "chunk_cat")) or func.namespace in (
            "c10d",
            "_c10d_functional",
        ):
            category = "collectives"
        elif moving() is not None:
            category = "received"
        elif phase.current() in ("forward", "loss"):
            category = "activations"
        else:
            category = "temporaries"
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not self._is_view(leaf, args):
                self._see(leaf, category)
        if name == "empty":  # FSDP makes the tensors so that it resizes later
            storage = result.untyped_storage()
            if (tracked := self.live.get(storage._cdata)) is not None:
                self.resizable[storage._cdata] = weakref.ref(storage), tracked
        scratch = self.scratch.bytes_of(func, args, kwargs, result)
        if scratch:
            block = Allocation(scratch, "temporaries", phase.current())
            self._event(scratch, block)
            self._event(-scratch, block)
        return result

    def _accumulates(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether autograd adds a gradient to one that has no other reference, or rows into zeros that it has just made: it then
        writes into these, but not under a mode.
        """
        if func not in _ADDING or torch.is_grad_enabled():
            return False
        caller: FrameType | None = sys._getframe(2)
        while caller is not None and caller.f_code.co_filename.endswith(_WRAPPERS):
            caller = caller.f_back
        if caller is None or caller.f_code.co_name != "_engine_run_backward":
            return False
        if func is not torch.ops.aten.add.Tensor:
            return True
        if kwargs:
            return False
        old, new = args
        return (
            isinstance(old, torch.Tensor)
            and isinstance(new, torch.Tensor)
            and old.shape == new.shape
            and torch_private.use_counts(old) == ALONE
            and _is_dense(old)
        )

    def _see(self, tensor: torch.Tensor, category: str, relabel: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self.live.get(key)
        if known is not None:
            if relabel:
                known.block.category = category
            return
        block = Allocation(storage.nbytes(), category, phase.current())
        self.live[key] = _Tracked(block, weakref.ref(storage, lambda _: self._gone(key)))
        self._event(block.bytes, block)

    def _is_view(self, result: torch.Tensor, args: Any) -> bool:
        """Whether an unknown storage came in with the arguments: it was made before anyone looked, a mesh's
        table say.
        """
        key = result.untyped_storage()._cdata
        return key not in self.live and any(
            isinstance(t, torch.Tensor) and t.untyped_storage()._cdata == key for t in tree_leaves(args)
        )

    def _alias(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Count `result` as the same allocation as `tensor`."""
        source, key = self.live.get(tensor.untyped_storage()._cdata), result.untyped_storage()._cdata
        if source is None or key in self.live:
            return
        source.block.holders += 1
        self.live[key] = _Tracked(
            source.block, weakref.ref(result.untyped_storage(), lambda _: self._gone(key))
        )

    def _poll(self) -> None:
        """Notice storages that were resized since the last operator."""
        gone = []
        for key, (
            reference,
            tracked,
        ) in self.resizable.items():  # before every operator, so as little as possible
            storage = reference()
            if storage is None:
                gone.append(key)
            elif storage.nbytes() != tracked.block.bytes:
                tracked.block.category = "gathered"
                self._event(storage.nbytes() - tracked.block.bytes, tracked.block)
                tracked.block.bytes = storage.nbytes()
        for key in gone:
            del self.resizable[key]

    def _gone(self, key: int) -> None:
        tracked = self.live.pop(key, None)
        if tracked is not None:
            tracked.block.holders -= 1
            if tracked.block.holders == 0:
                self._event(-tracked.block.bytes, tracked.block)

    def _event(self, delta: int, block: Allocation) -> None:
        if delta:
            self.events.append(Event(delta, block, phase.current(), self.running.current))


@contextmanager
def counted_random_states(memory: MemoryTracker) -> Iterator[None]:
    """Let the tracker see the states of the CPU's generator that checkpointing saves: no operator makes
    them.
    """
    original = torch.random.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = original()
        memory.adopt([state], "activations")
        return state

    torch.random.get_rng_state = torch.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.random.get_rng_state = torch.get_rng_state = original


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side in some order of the dimensions, as autograd asks of what it
    writes into.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _locals(tensor: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(tensor, torch_private.Elementless):
        return []
    return [tensor.to_local()] if isinstance(tensor, DTensor) else [tensor]


@dataclass(frozen=True)
class Point:
    """Memory in use after one event: bytes by category."""

    phase: str
    module: str
    total: int
    by_category: Mapping[str, int]


@dataclass(frozen=True)
class Usage:
    """Memory over a step: the peak, what lives there and where it lies, and the course of it."""

    peak: int
    phase: str
    module: str
    at_peak: Mapping[str, int]
    course: tuple[Point, ...] = field(default=())


@dataclass(frozen=True)
class MemoryChange:
    """An event whose category is final: plain data."""

    delta: int
    category: str
    phase: str
    module: str


def settled(events: Sequence[Event], start: int) -> tuple[dict[str, int], list[MemoryChange]]:
    """What is in use before event `start`, by category, and the changes from there on, with the categories
    known by now.

    What came before only says what is in use then: DTensor traces each operator once on tensors that are
    never allocated, and those would count in the first step.
    """
    before = dict.fromkeys(CATEGORIES, 0)
    for event in events[:start]:
        before[event.block.category] += event.delta
    return before, [MemoryChange(e.delta, e.block.category, e.phase, e.module) for e in events[start:]]


def highest(before: Mapping[str, int], changes: Iterable[MemoryChange]) -> int:
    """The peak alone, in bytes."""
    total = sum(before.values())
    return max(total, *accumulate((change.delta for change in changes), initial=total))


def usage(before: Mapping[str, int], changes: Sequence[MemoryChange]) -> Usage:
    """Play changes back from what was in use before them."""
    first = Point("", "", sum(before.values()), dict(before))
    course = (first, *_played(before, changes))
    top = max(course, key=lambda point: point.total)  # the first of equal ones
    return Usage(top.total, top.phase, top.module, top.by_category, course)


def _played(before: Mapping[str, int], changes: Sequence[MemoryChange]) -> Iterator[Point]:
    """What is in use after each change."""
    sums = dict(before)
    total = sum(sums.values())
    for change in changes:
        sums[change.category] += change.delta
        total += change.delta
        yield Point(change.phase, change.module, total, dict(sums))


def outline(
    short: Sequence[MemoryChange], longer: Sequence[Sequence[MemoryChange]], missing: Sequence[int]
) -> list[MemoryChange]:
    """The highest point and the end of a stretch of changes, extended in a straight line: for each run of layers, as often as
    layers of it are `missing`, what `longer` has more than `short`.
    """
    (first_top, first_end), *others = map(_top_and_end, (short, *longer))
    top = {k: extended(first_top[k], (one[k] for one, _ in others), missing) for k in CATEGORIES}
    end = {k: extended(first_end[k], (one[k] for _, one in others), missing) for k in CATEGORIES}
    steps = sorted(top.items(), key=lambda x: x[1]) + sorted(
        ((k, end[k] - top[k]) for k in CATEGORIES), key=lambda x: x[1]
    )
    return [MemoryChange(delta, k, short[0].phase, short[0].module) for k, delta in steps if delta]


def _top_and_end(changes: Sequence[MemoryChange]) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """What is in use at the highest point and at the end, from nothing."""
    nothing = dict.fromkeys(CATEGORIES, 0)
    course = [Point("", "", 0, nothing), *_played(nothing, changes)]
    return max(course, key=lambda point: point.total).by_category, course[-1].by_category
