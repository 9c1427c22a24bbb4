"""The wording for lists of ranks in messages."""

from __future__ import annotations

from collections.abc import Iterable

MANY = 12
"""More ranks than this are counted."""


def ranks_named(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 4 to 7`; of many apart the first ones and their number."""
    own = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in own:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    if len(parts) > MANY:
        return f"{len(own)} ranks ({', '.join(parts[:3])} and more)"
    return f"rank{'s' if len(own) > 1 else ''} {', '.join(parts)}"
