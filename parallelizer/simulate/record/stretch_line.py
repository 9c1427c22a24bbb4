"""The time line of a model with many equal layers, from those of short ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from parallelizer.compiler.observe.equal_layers import Run
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.operators import Issued, Moment, Operator
from parallelizer.simulate.record.stretch import Look, NotPeriodic, extended, in_module, stretch_phases


def stretch_line(
    short: Sequence[Moment], longer: Sequence[Sequence[Moment]], runs: Sequence[Run]
) -> tuple[Moment, ...]:
    """The time line of all layers; empty where short ones do not differ by one layer. What a time costs is no reason to trace the
    whole model.
    """
    # A layer's moments are those of the layer before with another path: a few are made often.
    look = Look(module=lambda moment: moment.module, moved=functools.cache(_at))
    try:
        return tuple(stretch_phases(short, longer, lambda m: (m.phase, m.turn), look, runs, _outline))
    except NotPeriodic:
        return ()


def _at(moment: Moment, module: str) -> Moment:
    if isinstance(moment, Issued):
        return dataclasses.replace(moment, entry=in_module(moment.entry, module))
    return in_module(moment, module)


def _outline(
    short: Sequence[Moment], longer: Sequence[Sequence[Moment]], missing: Sequence[int]
) -> list[Moment]:
    """A phase outside forward and backward whose operators grow with the layers, as those over all parameters do, or come more
    often: for each run, as often as layers of it are `missing`, what `longer` has more than `short`.
    """
    every = (short, *longer)
    if all(len(moments) == len(short) for moments in longer):
        return [_grown(a, more, missing) for a, *more in zip(*every, strict=True)]
    sums = []
    issued = [[m for m in moments if isinstance(m, Issued)] for moments in every]
    if any(len(moments) != len(issued[0]) for moments in issued):
        raise NotPeriodic
    for moments in every:
        operators = [m for m in moments if isinstance(m, Operator)]
        if not operators:
            raise NotPeriodic
        moved, kernels = sum(o.moved for o in operators), sum(o.kernels for o in operators)
        sums.append(
            dataclasses.replace(operators[0], moved=moved, kernels=kernels, kind="memory", sizes=None)
        )
    return [
        _grown(sums[0], sums[1:], missing),
        *(_grown(a, more, missing) for a, *more in zip(*issued, strict=True)),
    ]


def grown_entry(short: Collective, longer: Sequence[Collective], missing: Sequence[int]) -> Collective:
    """A collective that carries something of each layer. NotPeriodic if they differ in anything but their bytes."""
    for one in longer:
        if dataclasses.replace(one, payload_bytes=short.payload_bytes, wire_bytes=short.wire_bytes) != short:
            raise NotPeriodic
    return dataclasses.replace(
        short,
        payload_bytes=extended(short.payload_bytes, (one.payload_bytes for one in longer), missing),
        wire_bytes=extended(short.wire_bytes, (one.wire_bytes for one in longer), missing),
    )


def _grown(short: Moment, longer: Sequence[Moment], missing: Sequence[int]) -> Moment:
    if isinstance(short, Issued):
        issued = [one.entry for one in longer if isinstance(one, Issued)]
        return (
            dataclasses.replace(short, entry=grown_entry(short.entry, issued, missing)) if issued else short
        )
    if not isinstance(short, Operator):
        return short
    operators = [one for one in longer if isinstance(one, Operator)]
    if len(operators) < len(longer):
        return short

    def size(name: str) -> int:
        return extended(getattr(short, name), (getattr(one, name) for one in operators), missing)

    return dataclasses.replace(
        short,
        moved=size("moved"),
        kernels=size("kernels"),
        modules=size("modules"),
        dtensors=size("dtensors"),
    )
