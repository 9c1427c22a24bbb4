"""The rehearsed ranks on a page."""

from __future__ import annotations

from collections.abc import Sequence

from parallelizer.report.html.markup import Markup, join, tag
from parallelizer.report.html.table import table
from parallelizer.report.rows.rehearsal import UNSEEN, Compared


def section(compared: Sequence[Compared]) -> Markup:
    """A table for each rank, with the costliest kernels below it, and what a rehearsal cannot show."""
    return join([_rank(one) for one in compared], tag("p", UNSEEN, class_="quiet"))


def _rank(one: Compared) -> Markup:
    found = one.rehearsal
    total = sum(found.kernels.seconds.values())
    kernels = [
        [tag("code", name), f"{seconds / total:.1%}"]
        for name, seconds in found.kernels.costliest.items()
        if total
    ]
    return join(
        table(f"Rank {found.rank:,} of {found.ranks:,} on {found.device}", ["what", "*rehearsed"], one.lines),
        table("The costliest kernels", ["kernel", "#share"], kernels, cards=False),
    )
