"""The dry run as text: what is sent in one step, over which axis and how often, and what is held when memory is fullest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallelizer.show.plan import size
from parallelizer.simulate.ledger import totals
from parallelizer.simulate.trace import Trace

BAR = 40


def write(trace: Trace, stream: TextIO, *, device: str, hardware: Mapping[str, Any] | None = None, width: int | None = None) -> None:
    """Print the collectives and the memory of one rank's step."""
    console = Console(file=stream, width=width or (None if stream.isatty() else 100), highlight=False)
    _collectives(trace, device, console)
    _memory(trace, hardware or {}, console)


def _collectives(trace: Trace, device: str, console: Console) -> None:
    if not trace.ledger:
        console.print(Text.assemble(("collectives", "bold"), "  none: one rank talks to nobody"), "")
        return
    title = Text.assemble(("collectives", "bold"), f" of one step, as rank {trace.rank} sees them; operators as on {device}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in ("phase", "axis", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("count", "payload", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in totals(trace.ledger):
        table.add_row(
            row["phase"], row["axis"], row["kind"], f"{row['count']:,}", size(row["payload_bytes"]), size(row["wire_bytes"])
        )
    console.print(table)
    sent = sum(e.wire_bytes for e in trace.ledger)
    console.print(f"  {len(trace.ledger):,} collectives; this rank sends {size(sent)} a step\n")


def _memory(trace: Trace, hardware: Mapping[str, Any], console: Console) -> None:
    memory = trace.memory
    where = f"{memory.phase or 'between steps'}{', ' + memory.module if memory.module else ''}"
    console.print(Text.assemble(("memory", "bold"), f" of rank {trace.rank}: peak {size(memory.peak)}, in {where}"))
    for kind, held in memory.at_peak.items():
        if held:
            bar = "█" * max(1, round(BAR * held / memory.peak))
            console.print(f"  {kind:<12} {size(held):>12}  {bar}")
    capacity = hardware.get("memory_gib")
    if capacity:
        total = int(capacity) << 30
        margin = total - memory.peak
        verdict = f"fits, {size(margin)} to spare" if margin >= 0 else f"does not fit, {size(-margin)} too much"
        console.print(f"  {hardware.get('name')}: {size(total)}; {verdict}")
        console.print("  not counted: the allocator's fragmentation, kernels' workspaces, NCCL's buffers, the CUDA context")
    console.print()
