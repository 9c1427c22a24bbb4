"""Tensors that a unit hands on otherwise than by what it returns: as an attribute, in a list of its caller, or by writing into
an argument. The stages of a pipeline send what units return, so such a tensor is lost where another stage reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch

from parallelizer.compiler.observe.users_code import written_here
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.torch_private import storage_key

How = Literal["made", "kept", "wrote"]

Call = tuple[str, int, int]
"""A unit, the index of its call in the forward, and the number of cuts that could lie before it."""


@dataclass(frozen=True)
class LeftBehind:
    """A tensor that a call of `unit` made, and that `reader` read at another place: a unit, or the code around units if it is
    empty. `how` the unit left it: it made it and did not return it, kept what it returned, or wrote into an argument. Places are
    numbers of cuts that could lie before; `span` is the line that reads.
    """

    unit: str
    place: int
    reader: str
    read_place: int
    how: How
    span: Span | None


@dataclass
class Behind:
    """What units have made and written, by storage, until they return it. What they return is given on as another tensor with
    the same storage, so that the tensor itself is only where the unit has left it. The tensors are held, so that neither a
    storage nor an id is used anew.
    """

    found: dict[tuple[str, str], LeftBehind] = field(default_factory=dict)
    by_storage: dict[int, tuple[Call, How]] = field(default_factory=dict)
    inside: dict[int, Call] = field(default_factory=dict)
    held: list[torch.Tensor] = field(default_factory=list)

    def read(self, call: Call | None, place: int, given: Iterable[torch.Tensor]) -> None:
        """Operands of an operator in a unit's call, or in the code around."""
        for tensor in given:
            kept = self.inside.get(id(tensor))
            made = self.by_storage.get(storage_key(tensor)) if kept is None else (kept, "kept")
            if made is None or made[0] == call:
                continue
            (unit, _, at), how = made
            reader = call[0] if call is not None else ""
            if (unit, reader) not in self.found:
                self.found[unit, reader] = LeftBehind(unit, at, reader, place, how, written_here())

    def made(
        self,
        call: Call,
        given: Iterable[torch.Tensor],
        returned: Iterable[torch.Tensor],
        written: Iterable[torch.Tensor],
    ) -> None:
        """The operands and results of an operator in a unit's call, and the operands that it has written into."""
        there = {storage_key(tensor) for tensor in given}
        for tensor in returned:
            if storage_key(tensor) not in there:
                self._keep(tensor, call, "made")
        for tensor in written:
            if self.by_storage.get(storage_key(tensor), (None,))[0] != call:
                self._keep(tensor, call, "wrote")

    def returned(self, call: Call, tensors: Iterable[torch.Tensor]) -> None:
        """What a call has returned, which is sent as another tensor."""
        for tensor in tensors:
            made = self.by_storage.pop(storage_key(tensor), None)
            if made is not None and made[0] == call:
                self.inside[id(tensor)] = call
                self.held.append(tensor)

    def _keep(self, tensor: torch.Tensor, call: Call, how: How) -> None:
        self.by_storage[storage_key(tensor)] = call, how
        self.held.append(tensor)
