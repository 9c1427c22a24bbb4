"""The time line of a model with many equal layers, from those of two short ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from parallelizer.compiler.observe.equal_layers import SHORT, Run
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.operators import Issued, Moment, Operator
from parallelizer.simulate.record.stretch import Look, NotPeriodic, in_module, stretch_phases


def stretch_line(short: Sequence[Moment], longer: Sequence[Moment], run: Run) -> tuple[Moment, ...]:
    """The time line of all layers; empty where the two do not differ by one layer. What a time costs is no reason to trace the
    whole model.
    """
    split, join = functools.cache(run.split), functools.cache(run.join)
    # A layer's moments are those of the layer before with another path: a few are made often.
    content = functools.cache(lambda moment: _at(moment, split(moment.module)[0]))
    moved = functools.cache(lambda moment, index: _at(moment, join(split(moment.module)[0], index)))
    look = Look(content=content, index=lambda moment: split(moment.module)[1], moved=moved)
    more = run.count - SHORT
    try:
        return tuple(
            stretch_phases(
                short, longer, lambda m: (m.phase, m.turn), look, run.count, lambda a, b: _outline(a, b, more)
            )
        )
    except NotPeriodic:
        return ()


def _at(moment: Moment, module: str) -> Moment:
    if isinstance(moment, Issued):
        return dataclasses.replace(moment, entry=in_module(moment.entry, module))
    return in_module(moment, module)


def _outline(short: Sequence[Moment], longer: Sequence[Moment], more: int) -> list[Moment]:
    """A phase outside forward and backward whose operators grow with the layers, as those over all parameters do, or come more
    often: `more` times what `longer` has more than `short`.
    """
    if len(short) == len(longer):
        return [_grown(a, b, more) for a, b in zip(short, longer, strict=True)]
    sums = []
    issued = [[m for m in moments if isinstance(m, Issued)] for moments in (short, longer)]
    if len(issued[0]) != len(issued[1]):
        raise NotPeriodic
    for moments in (short, longer):
        operators = [m for m in moments if isinstance(m, Operator)]
        if not operators:
            raise NotPeriodic
        moved, kernels = sum(o.moved for o in operators), sum(o.kernels for o in operators)
        sums.append(
            dataclasses.replace(operators[0], moved=moved, kernels=kernels, kind="memory", sizes=None)
        )
    return [_grown(sums[0], sums[1], more), *(_grown(a, b, more) for a, b in zip(*issued, strict=True))]


def grown_entry(short: Collective, longer: Collective, more: int) -> Collective:
    """A collective that carries something of each layer. NotPeriodic if the two differ in anything but their bytes."""
    if dataclasses.replace(longer, payload_bytes=short.payload_bytes, wire_bytes=short.wire_bytes) != short:
        raise NotPeriodic
    return dataclasses.replace(
        short,
        payload_bytes=short.payload_bytes + more * (longer.payload_bytes - short.payload_bytes),
        wire_bytes=short.wire_bytes + more * (longer.wire_bytes - short.wire_bytes),
    )


def _grown(short: Moment, longer: Moment, more: int) -> Moment:
    if isinstance(short, Issued) and isinstance(longer, Issued):
        return dataclasses.replace(short, entry=grown_entry(short.entry, longer.entry, more))
    if not (isinstance(short, Operator) and isinstance(longer, Operator)):
        return short
    return dataclasses.replace(
        short,
        moved=short.moved + more * (longer.moved - short.moved),
        kernels=short.kernels + more * (longer.kernels - short.kernels),
        modules=short.modules + more * (longer.modules - short.modules),
        dtensors=short.dtensors + more * (longer.dtensors - short.dtensors),
    )
