"""What exported code needs of this package when it splits the sequence, without a plan file: the buffers,
written in Python."""

from __future__ import annotations

from collections.abc import Mapping

from parallelizer.diagnostics import Span
from parallelizer.plan import Buffer, Plan


def buffers(batch: Mapping[str, int | str], model: Mapping[str, int]) -> Plan:
    """A plan of buffers alone: the dimension of each batch entry and of each model buffer (globs) that is the
    sequence; a text instead of a dimension says what is made as that entry, `positions`."""
    here = Span("<exported>")

    def entries(written: Mapping[str, int | str]) -> dict[str, Buffer]:
        return {
            name: Buffer(name, here, make=value) if isinstance(value, str) else Buffer(name, here, value)
            for name, value in written.items()
        }

    return Plan("exported", "<exported>", batch=entries(batch), buffers=entries(dict(model)))
