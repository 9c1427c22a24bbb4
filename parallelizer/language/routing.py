"""How many tokens a dry run takes to go to which expert: a preset's key `routing`. A real run counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parallelizer.diagnostics.diagnostic import Span

ROUTINGS = ("balanced", "worst")
"""The values of `routing` that are words. `{skew: 1.3}` and the name of a file are the others."""


class RoutingError(ValueError):
    """The counts of a run are of another model, batch or mesh."""


@dataclass(frozen=True)
class Routing:
    """What is assumed of the tokens of each rank: `skew` is what the busiest rank gets over the mean of all, 1 for `balanced`;
    with `worst` all tokens go to the first rank. `counted` are the counts of a run by the path of the module, which go before:
    for each call of a step, for every rank of the run, the rows that it sends to each expert. They come from `file`, which
    `span` names.
    """

    skew: float = 1.0
    worst: bool = False
    counted: Mapping[str, Sequence[Sequence[Sequence[int]]]] = field(default_factory=dict)
    file: str = field(default="", repr=False)
    span: Span | None = field(default=None, compare=False, repr=False)

    def rows(
        self, rows: int, experts: int, ranks: Sequence[int], index: int, path: str, call: int = 0
    ) -> tuple[list[int], list[list[int]]]:
        """Of `rows` rows on each of a group of `ranks`, in the `call` of a module with this number: how many the one with this
        index in the group sends to each expert, and how many each rank sends to each of its own experts. Raises RoutingError if
        the counts of a run are of another run.
        """
        own = experts // len(ranks)
        mine = slice(index * own, (index + 1) * own)
        if self.counted:
            table = self._counted(rows, experts, ranks, index, path, call)
            return list(table[index]), [list(row[mine]) for row in table]
        sent = self._sent(rows, experts, len(ranks))
        return sent, [sent[mine] for _ in ranks]

    def _counted(
        self, rows: int, experts: int, ranks: Sequence[int], index: int, path: str, call: int
    ) -> list[Sequence[int]]:
        """The rows that each of the ranks sends to each expert."""
        if path not in self.counted:
            raise RoutingError(f"it has no counts of {path}; its first are of {next(iter(self.counted))}")
        calls = self.counted[path]
        every = calls[call % len(calls)]
        if max(ranks) >= len(every):
            raise RoutingError(f"it has the counts of {len(every)} ranks, and this mesh has more")
        table = [every[rank] for rank in ranks]
        if other := {len(row) for row in table} - {experts}:
            raise RoutingError(f"it counts {max(other)} experts in {path}, which has {experts}")
        if (sent := sum(table[index])) != rows:
            raise RoutingError(
                f"rank {ranks[index]} sends {sent} rows to the experts of {path} in it, and {rows} rows here: a row for each "
                "expert of each token"
            )
        return table

    def _sent(self, rows: int, experts: int, ranks: int) -> list[int]:
        own = experts // ranks
        busiest = ranks if self.worst else min(self.skew, ranks)
        rest = (ranks - busiest) / (ranks - 1) if ranks > 1 else 0.0
        parts = [busiest / ranks] + [rest / ranks] * (ranks - 1)
        return _whole([part / own for part in parts for _ in range(own)], rows)

    def __str__(self) -> str:
        if self.counted:
            return "as counted by a run"
        return "worst" if self.worst else "balanced" if self.skew == 1 else f"skew {self.skew:g}"


BALANCED = Routing()


def _whole(parts: Sequence[float], total: int) -> list[int]:
    """Whole numbers that add up to `total` and lie as `parts`, which add up to 1."""
    found, before, above = [], 0, 0.0
    for part in parts:
        above += part
        upto = min(total, round(above * total))
        found.append(upto - before)
        before = upto
    found[-1] += total - before
    return found
