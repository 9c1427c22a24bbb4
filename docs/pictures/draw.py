"""Draws the pictures of docs/styles.md from docs/pictures/styles.yaml: `python docs/pictures/draw.py`.

Each picture has two halves, forward and backward. In a half every step is one line of two boxes, a tensor as rank 0 and
rank 1 hold it, or one bar across both, what moves between them. The colours follow the reader's light or dark side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
HALF, GAP, PAD = 300, 24, 16
WIDTH = 2 * HALF + GAP + 2 * PAD
CENTRES = (HALF * 0.25, HALF * 0.75)
SIDES = {1: 18, 2: 24, 8: 56, 16: 58, 32: 84, 64: 112, 2049: 112}
"""How long a dimension is drawn; growing with its size, and not in proportion."""

STYLE = """
text{font:14px system-ui,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;fill:#1f2933}
.card{fill:#fbfcfd;stroke:#d5dbe1}.head{font-weight:600;font-size:15px}.small{fill:#5b6773;font-size:13px}
.tensor{fill:#5b8def}.weight{fill:#3aa17e}.none{fill:none;stroke:#aeb8c2;stroke-dasharray:3 3}
.edge{fill:none;stroke:#33404d;stroke-width:1.2}.line{stroke:#d5dbe1}
.move{fill:#e2725b}.moved{fill:#fff;font-weight:600}.hatch{stroke:#fbfcfd;stroke-width:2.5}
@media (prefers-color-scheme:dark){text{fill:#e4e8ec}.card{fill:#20262d;stroke:#3a444e}.small{fill:#a9b4bf}
.tensor{fill:#6f9bf2}.weight{fill:#45b08c}.none{stroke:#66727e}.edge{stroke:#c9d1d9}.line{stroke:#3a444e}
.move{fill:#c9593f}.hatch{stroke:#20262d}}
"""


def main() -> None:
    for name, picture in pictures().items():
        (HERE / f"{name}.svg").write_text(drawn(name, picture))


def pictures() -> dict[str, Any]:
    """The data by style."""
    data: dict[str, Any] = yaml.safe_load((HERE / "styles.yaml").read_text())
    return data


def drawn(name: str, picture: Mapping[str, Any]) -> str:
    """The SVG of one style."""
    [axis] = picture["mesh"]
    halves, heights = [], []
    for number, phase in enumerate(("forward", "backward")):
        parts, height = half(picture[phase], axis, phase)
        left = PAD + number * (HALF + GAP)
        halves.append(f'<g transform="translate({left},{PAD})">{"".join(parts)}</g>')
        heights.append(height)
    height = round(max(heights) + 2 * PAD)
    middle = WIDTH / 2
    divide = f'<line class="line" x1="{middle}" y1="{PAD}" x2="{middle}" y2="{height - PAD}"/>'
    card = f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    hatch = (
        '<defs><pattern id="partial" width="7" height="7" patternTransform="rotate(45)" '
        'patternUnits="userSpaceOnUse"><line class="hatch" x1="0" y1="0" x2="0" y2="7"/></pattern></defs>'
    )
    title = f"<title>{escape(name)}: what two ranks of {axis} hold, and what moves</title>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img">{title}<style>{STYLE}</style>{hatch}{card}{divide}{"".join(halves)}</svg>\n'
    )


def half(steps: Sequence[Mapping[str, Any]], axis: str, phase: str) -> tuple[list[str], float]:
    """The steps of one phase from top to bottom, and how high they are together."""
    parts = [f'<text class="head" x="0" y="14">{phase}</text>']
    parts += [
        f'<text class="small" text-anchor="middle" x="{centre}" y="36">rank {rank} of {axis}</text>'
        for rank, centre in enumerate(CENTRES)
    ]
    y = 50.0
    for step in steps:
        new, y = bar(step, y) if "move" in step else boxes(step, y)
        parts += new
    if not any("move" in step for step in steps):
        parts.append(
            f'<text class="small" text-anchor="middle" x="{HALF / 2}" y="{y + 14}">nothing moves</text>'
        )
        y += 24
    return parts, y


def bar(step: Mapping[str, Any], y: float) -> tuple[list[str], float]:
    """What moves: one bar across both ranks."""
    said = f"{step['move'].replace('_', '-')}, {size(step['bytes'])}"
    return [
        f'<path class="move" d="M0 {y + 15} l11 -14 v4 h{HALF - 22} v-4 l11 14 l-11 14 v-4 h-{HALF - 22} v4 z"/>',
        f'<text class="moved" text-anchor="middle" x="{HALF / 2}" y="{y + 20}">{said}</text>',
    ], y + 38


def boxes(step: Mapping[str, Any], y: float) -> tuple[list[str], float]:
    """A tensor as both ranks hold it, under its name, size and placement."""
    kind = "weight" if "weight" in step else "tensor"
    shape, held = step["shape"], step["held"]
    sizes = " x ".join(map(str, shape))
    parts = [
        f'<text x="0" y="{y + 14}">{escape(step[kind])}</text>',
        f'<text class="small" text-anchor="end" x="{HALF}" y="{y + 14}">{sizes}, {escape(held)}</text>',
    ]
    width = SIDES[shape[-1]]
    height = SIDES[shape[-2]] * 0.6 if len(shape) > 1 else 14
    for rank, centre in enumerate(CENTRES):
        parts += box(kind, centre - width / 2, y + 21, width, height, parts_of(held, len(shape), rank))
        if held == "partial":
            parts.append(
                f'<rect fill="url(#partial)" x="{centre - width / 2}" y="{y + 21}" width="{width}" height="{height}"/>'
            )
    return parts, y + 21 + height + 12


def parts_of(held: str, dims: int, rank: int) -> list[tuple[float, float, float, float]]:
    """What one of two ranks has of a tensor: left, top, width and height as shares. The last dimension is drawn across,
    the one before it down.
    """
    if held in ("replicate", "partial"):
        return [(0, 0, 1, 1)]
    if held == "head-tail":
        return [(0, 0.25 * chunk, 1, 0.25) for chunk in (rank, 3 - rank)]
    across = int(held.removeprefix("shard(").removesuffix(")")) == dims - 1
    return [(rank / 2, 0, 0.5, 1)] if across else [(0, rank / 2, 1, 0.5)]


def box(
    kind: str,
    x: float,
    y: float,
    width: float,
    height: float,
    parts: Sequence[tuple[float, float, float, float]],
) -> list[str]:
    """A dashed outline of the whole, and filled what is held."""
    drawn = [f'<rect class="none" x="{x}" y="{y}" width="{width}" height="{height}"/>']
    for left, top, across, down in parts:
        at = (
            f'x="{x + left * width}" y="{y + top * height}" width="{across * width}" height="{down * height}"'
        )
        drawn += [f'<rect class="{kind}" {at}/>', f'<rect class="edge" {at}/>']
    return drawn


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count} B" if count < 1024 else f"{count / 1024:.3g} KiB"


if __name__ == "__main__":
    main()
