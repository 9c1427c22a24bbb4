"""What a forward and a loss decide by values: which side each decision took in the runs that are compared.

`torch.where`, a mask, a clamp, a boolean index, a comparison that is taken for a number, and an `if` on a tensor do one of
two things. A proof whose values took one side every time says nothing about the other, so the report lists such lines. Those
of installed packages are left out: they are not the reader's.
"""

from __future__ import annotations

import linecache
import textwrap
from typing import Any

import torch

from parallelizer.compiler.observe.users_code import written_here
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.torch_private import TorchDispatchMode

aten = torch.ops.aten

_CONDITION = {
    aten.where: 0,
    aten.masked_fill: 1,
    aten.masked_fill_: 1,
    aten.masked_select: 1,
    aten._to_copy: 0,
    aten.mul: 1,
    aten.any: 0,
    aten.all: 0,
}
"""Operators that choose by a tensor of truth values, and the argument that may hold it."""

_INDEXED = {aten.index, aten.index_put, aten.index_put_}

_BOUND = {aten.clamp, aten.clamp_min, aten.clamp_max, aten.clamp_, aten.clamp_min_, aten.clamp_max_}

_WORDS = {
    "condition": ("its condition was true for every value", "its condition was false for every value"),
    "bound": ("every value was beyond the bound", "no value was beyond the bound"),
    "branch": ("the value was true every time", "the value was false every time"),
}
"""What is said of a decision that was true, or false, every time."""


class Decisions(TorchDispatchMode):
    """Notes decisions while it is active, by the line of the user's code that they are written at. `caller` is the file that runs
    the step: what it calls is looked at, and not who called it. With `operators` the names of all operators are kept in order,
    with the line of those that bring values to the host.
    """

    def __init__(self, caller: str, *, operators: bool = False) -> None:
        super().__init__()
        self._caller, self._lists = caller, operators
        self.operators: list[tuple[str, Span | None]] = []
        self._taken: dict[tuple[Span, str], set[bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        # A condition is read before the operator runs: it may change its input in place.
        if packet in _CONDITION:
            self._note("condition", args[_CONDITION[packet]] if len(args) > _CONDITION[packet] else None)
            if packet is aten.mul:
                self._note("condition", args[0])
        elif packet in _INDEXED:
            for index in args[1]:
                self._note("condition", index)
        before = args[0].clone() if packet in _BOUND else None
        result = func(*args, **(kwargs or {}))
        if before is not None:
            self._note("bound", result != before)
        elif func is aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            self._note("branch", args[0])
        if self._lists:
            read = not isinstance(result, torch.Tensor) or packet is aten.nonzero
            self.operators.append((str(func), written_here(within=self._caller) if read else None))
        return result

    def sides(self) -> dict[tuple[Span, str], frozenset[bool]]:
        """The sides that each decision took."""
        return {key: frozenset(sides) for key, sides in self._taken.items()}

    def one_sided(self) -> tuple[str, ...]:
        """The decisions that took one side every time, as `file:line: source: what happened`, in order of execution."""
        return tuple(
            f"{span.file}:{span.line}: `{_source(span)}`: {_WORDS[kind][0 if True in sides else 1]}"
            for (span, kind), sides in self._taken.items()
            if len(sides) == 1
        )

    def _note(self, kind: str, values: Any) -> None:
        if (
            not isinstance(values, torch.Tensor)
            or values.is_meta
            or values.dtype != torch.bool
            or not values.numel()
        ):
            return
        span = written_here(within=self._caller)
        if span is not None and "site-packages" not in span.file:
            sides = self._taken.setdefault((Span(span.file, span.line), kind), set())
            sides |= {True} if bool(values.any()) else set()
            sides |= set() if bool(values.all()) else {False}


def _source(span: Span) -> str:
    return textwrap.shorten(linecache.getline(span.file, span.line).strip(), 60, placeholder="...")
