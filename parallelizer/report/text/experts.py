"""Where experts live, as text, and what their tokens cost."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TextIO

from rich.text import Text

from parallelizer.diagnostics.units import size
from parallelizer.report.rows.experts import WORST, Sharing
from parallelizer.report.text.tables import Screen, width_of

RANKS = 16
"""So many ranks of a group are written out."""


def write(
    found: Sharing | None, stream: TextIO, per_node: int | None = None, *, width: int | None = None
) -> None:
    """Print how experts are shared out; nothing for a plan without. A node has `per_node` devices, if that is known."""
    if found is None:
        return
    screen = Screen(file=stream, width=width_of(stream, width), highlight=False)
    ranks = len(found.group)
    screen.print(Text.assemble(("experts", "bold"), f"  shared out among the {ranks} ranks of ep"))
    for head, text in _lines(found, per_node):
        first = f"  {head:<12}"
        for line in textwrap.wrap(
            text, screen.width, initial_indent=first, subsequent_indent=" " * len(first)
        ):
            screen.print(Text(line))
    screen.print()


def _lines(found: Sharing, per_node: int | None) -> Iterator[tuple[str, str]]:
    for (module, count), held in zip(found.modules, found.held, strict=True):
        yield "module", f"{module}, with {count} experts"
        shown = [
            f"rank {rank}: {first}" if first == last else f"rank {rank}: {first} to {last}"
            for rank, (first, last) in zip(found.group[:RANKS], held, strict=False)
        ]
        more = f", and so on for {len(held) - RANKS} more" if len(held) > RANKS else ""
        yield "experts", ", ".join(shown) + more
    if found.shards > 1:
        yield "fsdp", f"the {found.shards} ranks of efsdp share the parameters of each"
    if per_node:
        nodes = len({rank // per_node for rank in found.group})
        yield "nodes", "a group lies on one node" if nodes == 1 else f"a group lies on {nodes} nodes"
    if found.sent:
        sent = ", ".join(f"{phase} {size(number)}" for phase, number in found.sent)
        yield "sent", f"{sent}, if tokens go as routing says: {found.routing}"
    if len(found.peaks) > 1:
        yield "memory", ", ".join(f"peak {size(peak)} {_under(name)}" for name, peak in found.peaks)


def _under(routing: str) -> str:
    return "if all tokens go to one rank" if routing == str(WORST) else f"with routing {routing}"
