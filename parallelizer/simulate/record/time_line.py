"""The computation of a step, operator by operator, as far as its price depends on it.

Products of matrices and attention are recorded with their sizes. All other operators are recorded by the bytes that
they read and write. Neighbouring ones are joined into one entry, so that a layer has tens of entries instead of hundreds.
Inside a module that the plan compiles, such a chain is one kernel, which leaves out what only the chain itself reads.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallelizer import torch_private
from parallelizer.compiler.observe import phase
from parallelizer.compiler.observe.running_module import Running, within
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.operator_sizes import (
    COPIES,
    attention_sizes,
    bytes_of,
    gemm_sizes,
    tensors_in,
    way_of,
)
from parallelizer.simulate.record.operators import ATTENTION, GEMM, MEMORY, Issued, Moment, Operator, Wait

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
CASTS = (torch.ops.aten._to_copy.default,)


@dataclass
class _Seen:
    """An operator as it came. `reads` and `writes` are (storage, bytes); a storage has a number that no other has had."""

    operator: Operator
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    region: str | None


class TimeLine:
    """Collects a time line. The ledger calls `see` for each operator and `issue` for each collective."""

    def __init__(self, running: Running, compiled: Sequence[str] = ()) -> None:
        self.running, self.compiled = running, compiled
        self.line: list[_Seen | tuple[int, bool, bool] | Wait] = []
        self.numbers: dict[int, int] = {}
        self.issued: dict[int, int] = {}
        self.arriving: dict[int, int] = {}
        self.alive: dict[int, Any] = {}
        self.calls = self.count = self.modules = self.dtensors = 0
        self.last: dict[int, int] | None = None
        self.ways: dict[Any, str] = {}
        self.regions: dict[str, str | None] = {}
        running.started.append(self._module_begins)

    def _module_begins(self, path: str) -> None:
        self.modules += 1

    def dispatch(self) -> None:
        """An operator on DTensors begins."""
        self.dtensors += 1

    def issue(self, index: int, entry: Collective, unit: bool, plain: bool, tensors: Sequence[Any]) -> None:
        """A collective was entered into the ledger at `index`; `tensors` are those that it writes, or may. `plain`: one of a
        process group's own, which returns when it is done. Of a receive, the first reader waits.
        """
        self.calls += 1
        passed = entry.kind in ("send", "recv")
        self.line.append((index, unit, plain and not unit and not passed))
        for tensor in tensors:
            (self.arriving if entry.kind == "recv" else self.issued)[torch_private.storage_key(tensor)] = (
                self.calls
            )

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """One operator has run. Views, and what only allocates, take no time."""
        way = self.ways.get(func)
        if way is None:
            way = self.ways[func] = way_of(func)
        if not way:
            return
        if way == "wait":
            self._wait(args[0], result)
            return
        if way in ("alias", "made"):
            self._handed_on(way, args, result)
            return
        if torch_private.propagates_shapes():
            return
        given, made = list(tensors_in((args, tuple(kwargs.values())))), list(tensors_in(result))
        if not made and not given:
            return
        self._wait_for_arriving(given)
        now, module = phase.current(), self.running.current
        again = now == "backward" and torch.is_grad_enabled()
        reads, writes = self._moved(way, given, made)
        first = made[0] if made else given[0]
        dtype = str(first.dtype).removeprefix("torch.")
        kind, sizes, causal, backward = MEMORY, None, False, False
        if way in (GEMM, ATTENTION):
            read = (gemm_sizes if way == GEMM else attention_sizes)(func, args, first)
            if read is not None:
                kind, (sizes, causal, backward, dtype) = way, read
        copies = COPIES.get(func._schema.name, "") if now in ("forward", "backward") else ""
        moved = sum(size for _, size in reads) + sum(size for _, size in writes)
        region = None if copies else self._region(module)
        operator = Operator(
            now, module, kind, func._schema.name.partition("::")[2], dtype, moved, sizes, causal, backward,
            modules=self.modules, again=again, compiled=region is not None, copies=copies, dtensors=self.dtensors,
            casts=int(func in CASTS and dtype in FLOAT8), turn=phase.begun(),
        )  # fmt: skip
        self.modules = self.dtensors = 0
        self.line.append(_Seen(operator, reads, writes, region))

    def _moved(
        self, way: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """What an operator reads and what it writes: (storage, bytes) each."""
        reads = [(self._number(t), bytes_of(t)) for t in given]
        known = {number for number, _ in reads}
        writes = []
        for tensor in made:
            number = self.numbers.get(torch_private.storage_key(tensor), 0)
            writes.append((number if number in known else self._new(tensor), bytes_of(tensor)))
        if way == "rows":  # a lookup reads what it returns
            reads = [(number, min(size, writes[0][1])) for number, size in reads]
        if way == "own":  # FSDP's gather is given the buffer for all ranks' shards, and a rank writes its own
            reads = writes = writes[:1]
        return reads, writes

    def _handed_on(self, way: str, args: tuple[Any, ...], result: Any) -> None:
        """Storages that come without a computation: their own, or those of the first argument under another address."""
        known = {torch_private.storage_key(t) for t in tensors_in(args)} if way == "made" else set()
        for tensor in tensors_in(result):
            if torch_private.storage_key(tensor) not in known:  # otherwise it was made in place
                self._new(tensor, self._number(args[0]) if way == "alias" else None)

    def _wait_for_arriving(self, given: Sequence[torch.Tensor]) -> None:
        for tensor in given if self.arriving else ():
            call = self.arriving.pop(torch_private.storage_key(tensor), None)
            if call is not None:
                self._wait_for(call)

    def _wait(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        call = self.issued.pop(torch_private.storage_key(tensor), None)
        if call is not None:
            self._wait_for(call)
        self._new(result, self._number(tensor))

    def _wait_for(self, call: int) -> None:
        self.line.append(Wait(phase.current(), self.running.current, self.calls - call + 1, phase.begun()))

    def _region(self, module: str) -> str | None:
        if module not in self.regions:
            self.regions[module] = next((path for path in self.compiled if within(module, path)), None)
        return self.regions[module]

    def _number(self, tensor: torch.Tensor) -> int:
        key = torch_private.storage_key(tensor)
        return self.numbers[key] if key in self.numbers else self._new(tensor)

    def _new(self, tensor: torch.Tensor, number: int | None = None) -> int:
        """Give the tensor's storage a number until it is freed: another may come to lie at its address."""
        if number is None:
            self.count += 1
            number = self.count
        key, storage = torch_private.storage_key(tensor), tensor.untyped_storage()
        self.numbers[key] = number
        self.alive[key] = weakref.ref(storage, lambda _: self._freed(key))
        return number

    def _freed(self, key: int) -> None:
        self.alive.pop(key, None)
        for known in (self.numbers, self.issued, self.arriving):
            known.pop(key, None)

    def moments(self, entries: Sequence[Collective], places: Sequence[int] | None = None) -> list[Moment]:
        """The time line, with the ledger's entries in their places; with `places`, these of its entries alone."""
        if self.last is None:
            self.last = {}
            for place, seen in enumerate(self.line):
                if isinstance(seen, _Seen):
                    self.last.update((number, place) for number, _ in seen.reads)
        return list(self._joined(entries, range(len(self.line)) if places is None else places, self.last))

    def _joined(
        self, entries: Sequence[Collective], places: Sequence[int], last: dict[int, int]
    ) -> Iterator[Moment]:
        chain: list[_Seen] = []
        end = 0
        for place in places:
            seen = self.line[place]
            if chain and not (isinstance(seen, _Seen) and _joins(chain[-1], seen)):
                yield _one(chain, end, last)
                chain = []
            end = place + 1
            if isinstance(seen, _Seen):
                chain.append(seen)
            elif isinstance(seen, Wait):
                yield seen
            else:
                index, unit, waits = seen
                yield Issued(entries[index], unit, waits)
        if chain:
            yield _one(chain, end, last)


def _joins(before: _Seen, seen: _Seen) -> bool:
    """Whether an operator belongs to the same chain: in one compiled module, or in one module that is not compiled."""
    a, b = before.operator, seen.operator
    if a.kind != MEMORY or b.kind != MEMORY or a.copies or b.copies:
        return False
    if (a.phase, a.turn, a.again, before.region) != (b.phase, b.turn, b.again, seen.region):
        return False
    return seen.region is not None or a.module == b.module


def _one(chain: list[_Seen], end: int, last: dict[int, int]) -> Operator:
    """A chain as one operator. `end` is the place behind it in the line, and `last` the place where a storage is last read."""
    first = chain[0].operator
    if len(chain) == 1:
        return first
    added = {name: sum(getattr(s.operator, name) for s in chain) for name in ("modules", "dtensors", "casts")}
    first = dataclasses.replace(first, name="chain", **added)
    if chain[0].region is None:
        moved = sum(seen.operator.moved for seen in chain)
        return dataclasses.replace(first, moved=moved, kernels=len(chain))
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    for seen in chain:
        for number, size in seen.reads:
            if number not in written:
                read[number] = max(size, read.get(number, 0))
        for number, size in seen.writes:
            written[number] = max(size, written.get(number, 0))
    # What is read by nothing is a result of the step: a gradient, say.
    kept = sum(size for number, size in written.items() if not 0 <= last.get(number, -1) < end)
    moved = sum(read.values()) + kept
    return dataclasses.replace(first, moved=moved, kernels=1)
