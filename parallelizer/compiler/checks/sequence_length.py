"""Checks the length of the sequence: context parallelism splits it into two chunks a rank, and tp splits it
again if the stream is sharded along it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.language.plan import Flow, Placement

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation


def sequence_length(state: Compilation) -> Iterator[Diagnostic]:
    """`seq_len` must divide by `2*cp`, and what a cp rank holds by `tp` under sequence parallelism.

    Where no batch entry has a sequence, as with images, its length says nothing of what is cut inside the model.
    """
    work, cp, tp = state.workload, state.mesh.sizes["cp"], state.mesh.sizes["tp"]
    if work is None or not work.has_sequence():
        return
    parts, why, axes = 1, [], []
    if cp > 1:
        parts, why, axes = 2 * cp, [f"2*cp={2 * cp}"], ["cp"]
    if tp > 1 and _along_sequence(state):
        cut = max(cp, 1) * tp
        parts = math.lcm(parts, cut)
        why.append(f"cp*tp={cut}" if cp > 1 else f"tp={tp}")
        axes.append("tp")
    if cp > 1 and work.seq_len % parts and work.seq_len > 0 and _padded(state):
        # As `shard_tokens` does it, whether or not tp cuts the sequence again.
        length = -(-work.seq_len // (whole := math.lcm(2 * cp, cp * tp))) * whole
        yield Diagnostic(
            "sequence-padded",
            f"a sequence of {work.seq_len:,} tokens is not a multiple of {whole}, so it is padded to {length:,}",
            work.spans.get("seq_len"),
            f"{(length - work.seq_len) / length:.1%} of the computation is padding",
            "note",
        )
        return
    if work.seq_len % parts or work.seq_len < 1:
        below, above = work.seq_len // parts * parts, (work.seq_len // parts + 1) * parts
        near = f"{below} or {above}" if below else str(above)
        related = tuple(
            Related(state.mesh.spans[a], f"{a}={state.mesh.sizes[a]} is set here")
            for a in axes
            if a in state.mesh.spans
        )
        yield Diagnostic(
            "sequence-not-divisible",
            f"a sequence of {work.seq_len:,} tokens is not a multiple of {parts} ({', '.join(why)})",
            work.spans.get("seq_len"),
            f"set train.seq_len={near}{_degrees(work.seq_len, cp, tp, 'tp' in axes)}",
            related=related,
        )


def _padded(state: Compilation) -> bool:
    """Whether the batch says what its labels are padded with."""
    return any(buffer.pad is not None for buffer in state.plan.batch.values())


def _degrees(length: int, cp: int, tp: int, sharded: bool) -> str:
    """The degrees that would fit this length: of tp where it shards the sequence, otherwise of cp."""
    if sharded and length % (2 * cp if cp > 1 else 1) == 0:
        axis, fits = "tp", [n for n in range(1, 2 * tp + 1) if length % (max(cp, 1) * n) == 0]
    else:
        axis, fits = "cp", [n for n in range(1, 2 * cp + 1) if n == 1 or length % (2 * n) == 0]
    return f"; with this length {axis} can be {', '.join(map(str, fits))}" if len(fits) > 1 else ""


def _along_sequence(state: Compilation) -> bool:
    """Whether a tensor style lays an activation out along dimension 1 over tp."""
    return any(
        "tp" in a.axes
        and ((a.style == "sequence" and _layout(a.options)) or any(_mentions(v) for v in a.options.values()))
        for a in state.applications
        if a.slot in ("params", "io")
    )


def _layout(options: Mapping[str, Any]) -> bool:
    layout: Placement | None = options.get("layout")
    return layout is None or layout.dim == 1


def _mentions(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    flows = [v for v in value.values() if isinstance(v, Flow)]
    return any(p is not None and p.dim == 1 for f in flows for p in (f.arrives, f.wanted))
