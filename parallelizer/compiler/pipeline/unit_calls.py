"""The calls of a model's units in one forward, and what each of them needs of those before."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.pipeline.stages import UnitOutput


@dataclass(frozen=True)
class Draw:
    """Random numbers that glue, or a module that every stage can run, draws: the `number`-th draw of the forward."""

    operator: str
    number: int


Need = UnitOutput | Draw | str
"""A value, random numbers, or the name of a parameter."""


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit. `place` is the number of cuts that could lie before it. It is `free` if it has no parameters and
    nothing that it reads depends on any: each stage can run it. `flops` are those of its forward, `bytes` the size of
    all tensors that its operators return. `span` is the line of the model that calls it.
    """

    unit: str
    index: int
    place: int
    needs: frozenset[Need]
    free: bool
    flops: int = 0
    bytes: int = 0
    span: Span | None = field(default=None, compare=False)
