"""What came of the typos, by kind, and those that survive by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.typos.sweep import Result
from tests.typos.words import CLAIMED

HEADER = (
    "in",
    "typos",
    "right code and line",
    "other code",
    "other line",
    "warned",
    "survived",
    "of these the same plan",
)


def _row(name: str, results: Sequence[Result]) -> tuple[str, ...]:
    def count(caught: str) -> int:
        return sum(result.caught == caught for result in results)

    right = f"{count('right'):,} ({count('right') / max(len(results), 1):.2%})"
    same = sum(result.same and result.caught == "survived" for result in results)
    return (
        name,
        f"{len(results):,}",
        right,
        *(f"{count(c):,}" for c in ("code", "elsewhere", "warned", "survived")),
        f"{same:,}",
    )


def table(results: Sequence[Result]) -> str:
    """A table by kind; the claimed kinds first, then their sum, then the others."""
    kinds = dict.fromkeys((*CLAIMED, *(result.typo.word.kind for result in results)))
    by_kind = {kind: [result for result in results if result.typo.word.kind == kind] for kind in kinds}
    claimed = [result for kind in CLAIMED for result in by_kind[kind]]
    rows = [HEADER, *(_row(kind, by_kind[kind]) for kind in CLAIMED), _row("together", claimed)]
    rows += [_row(kind, by_kind[kind]) for kind in kinds if kind not in CLAIMED]
    rows.append(_row("everything", results))
    for how in ("deletion", "swap", "substitution", "insertion"):
        rows.append(_row(f"{how}s, claimed kinds", [r for r in claimed if r.typo.how == how]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def named(results: Iterable[Result]) -> str:
    """Every typo that is not told by the right code at the right line, one to a line."""
    lines = []
    for result in results:
        if result.caught != "right":
            word = result.typo.word
            said = f" ({', '.join(result.codes)})" if result.codes else " (same plan)" if result.same else ""
            lines.append(
                f"  {result.caught:<10}{result.file}:{word.line + 1} {word.kind} {word.text!r} -> {result.typo.spelt!r}{said}"
            )
    return "\n".join(sorted(lines))


def shares(results: Iterable[Result]) -> tuple[float, float]:
    """How many of the typos in the claimed kinds are told by the right code at the right line: of all, and of
    those that change what the plan means (`w[qkv]` spelt `w[kqv]` does not).
    """
    claimed = [result for result in results if result.typo.word.kind in CLAIMED]
    right = sum(result.caught == "right" for result in claimed)
    harmless = sum(result.same and result.caught != "right" for result in claimed)
    return right / max(len(claimed), 1), right / max(len(claimed) - harmless, 1)
