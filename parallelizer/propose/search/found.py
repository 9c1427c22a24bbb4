"""What a search knows of its candidates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from parallelizer.propose.search.estimate import Estimate
from parallelizer.propose.search.truth import NotTraced, TracedWhole

STATES = "their parameters and gradients alone do not fit"
"""A reason of `pruned`."""


@dataclass
class SearchResult:
    """`results` are the candidates that were traced whole and fit, best first; `too_large` those that do not fit, with the
    smallest peak first; `priced` all that were priced, best first. `excluded` counts by reason; `pruned` by bound. `cut_short`
    is true where more candidates may fit, and were not dry-run because that takes long. `complete` is false after Ctrl-C.
    `states` are the bytes that the parameters and gradients need at least on a rank, where they leave no candidate.
    """

    total: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    pruned: Counter[str] = field(default_factory=Counter)
    classes: int = 0
    priced: list[Estimate] = field(default_factory=list)
    results: list[TracedWhole] = field(default_factory=list)
    too_large: list[TracedWhole] = field(default_factory=list)
    failed: list[NotTraced] = field(default_factory=list)
    cut_short: bool = False
    complete: bool = True
    states: int = 0

    def sort(self) -> None:
        """Put every list in its order."""
        self.results.sort(key=lambda r: (r.seconds, r.candidate))
        self.too_large.sort(key=lambda r: (r.peak, r.candidate))
        self.priced.sort(key=lambda e: (e.seconds, e.candidate))
