"""The time of a step as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TextIO

from rich.text import Text

from parallelizer.report.rows.time import (
    TimeShare,
    compute_shares,
    costliest_modules,
    duration,
    range_of,
    wait_shares,
)
from parallelizer.report.text.tables import Screen, width_of
from parallelizer.simulate.time.predict import StepTime

LEAST = 0.005
"""Shares below this are left out."""


def write(time: StepTime, stream: TextIO, *, device: str, width: int | None = None) -> None:
    """Print how long a step takes, with its range, and where the time goes. `device` is what the step was planned for."""
    screen = Screen(file=stream, width=width_of(stream, width), highlight=False)
    screen.print(
        Text.assemble(
            ("time", "bold"),
            "   ",
            (duration(time.seconds), "bold"),
            f" a step ({range_of(time)}) on {time.machine}",
        )
    )
    lines = [
        _rates(time),
        f"{_part('compute', compute_shares(time))}   {_part('waiting', wait_shares(time))}",
    ]
    costliest = [
        f"{share.name} {share.share:.0%}" for share in costliest_modules(time) if share.share >= LEAST
    ]
    if costliest:
        lines.append(f"the costliest: {', '.join(costliest)}")
    if time.links:
        links = [
            f"{axis} {duration(seconds)}, waited for {duration(time.waits.get(axis, 0.0))}" if time.waits.get(axis, 0.0) >= 1e-6
            else f"{axis} {duration(seconds)}, hidden"
            for axis, seconds in sorted(time.links.items(), key=lambda x: -x[1])
        ]  # fmt: skip
        lines.append(f"collectives: {'; '.join(links)}")
    if device == "cpu" and time.peak:
        lines.append("Planned as on a CPU, in its dtype; device=cuda plans the step of a GPU.")
    for line in lines:
        for wrapped in textwrap.wrap(line, screen.width - 2, subsequent_indent="  "):
            screen.print(f"  {wrapped}", soft_wrap=True)
    screen.print()


def _rates(time: StepTime) -> str:
    tokens = f"{time.tokens_per_second:,.0f} tokens/s a device"
    if time.mfu is None or time.causal_mfu is None:
        return tokens
    causal = (
        ""
        if time.mfu == time.causal_mfu
        else f" ({time.causal_mfu:.0%} without the masked half of attention)"
    )
    return f"{time.mfu:.0%} MFU{causal}, {tokens}"


def _part(name: str, shares: Iterable[TimeShare]) -> str:
    """`compute 81 %: GEMMs 61, attention 12`."""
    shown = list(shares)
    each = ", ".join(f"{share.name} {100 * share.share:.0f}" for share in shown if share.share >= LEAST)
    return f"{name} {sum(share.share for share in shown):.0%}" + (f": {each}" if each else "")
