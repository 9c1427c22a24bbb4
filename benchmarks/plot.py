"""A bar chart as SVG, without a plotting library: medians with their quartiles, against a limit of 100 %."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

from benchmarks.turns import Quartiles

WIDTH, LEFT, ROW, TOP = 800, 150, 26, 58


def bars(path: Path, title: str, note: str, shares: Mapping[str, Quartiles]) -> None:
    """Write bars of lower quartile, median and upper quartile, in per cent, one a name."""
    most = max(110.0, *(high for _, _, high in shares.values()))
    scale = (WIDTH - LEFT - 70) / most
    height = TOP + ROW * len(shares) + 34

    def at(share: float) -> float:
        return round(LEFT + share * scale, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="14" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="14" y="41" font-size="12" fill="#555">{escape(note)}</text>',
    ]
    bottom = TOP + ROW * len(shares)
    for tick in range(0, int(most) + 1, 25):
        strong = tick == 100
        lines += [
            f'<line x1="{at(tick)}" y1="{TOP - 4}" x2="{at(tick)}" y2="{bottom}" stroke="{"#222" if strong else "#ddd"}"/>',
            f'<text x="{at(tick)}" y="{bottom + 18}" text-anchor="middle" fill="#555">{tick} %</text>',
        ]
    for row, (name, (low, middle, high)) in enumerate(shares.items()):
        y = TOP + ROW * row
        color = "#999" if name in ("torch's ring", "contiguous", "contiguous, same code") else "#2b6cb0"
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{at(middle) - LEFT:.1f}" height="16" fill="{color}"/>',
            f'<line x1="{at(low)}" y1="{y + 11}" x2="{at(high)}" y2="{y + 11}" stroke="#d97706" stroke-width="3"/>',
            f'<text x="{at(max(high, middle)) + 6}" y="{y + 15}">{middle:.0f} %</text>',
        ]
    path.write_text("\n".join([*lines, "</svg>", ""]))
