"""Draws docs/pictures/flow.svg, the diagram of docs/how_it_works.md: `python docs/pictures/flow.py`."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT = 640, 372

STYLE = """
text{font:15px system-ui,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;fill:#1f2933;text-anchor:middle}
.card{fill:#fbfcfd;stroke:#d5dbe1}.small{fill:#5b6773;font-size:13px}.name{font-weight:600}
.given{fill:#e6eefc;stroke:#5b8def}.ours{fill:#e2f3ec;stroke:#3aa17e}.does{fill:#fbeae6;stroke:#e2725b}
.arrow{fill:none;stroke:#5b6773;stroke-width:1.5}.tip{fill:#5b6773}
@media (prefers-color-scheme:dark){text{fill:#e4e8ec}.card{fill:#20262d;stroke:#3a444e}.small{fill:#a9b4bf}
.given{fill:#24344f;stroke:#6f9bf2}.ours{fill:#1f3d33;stroke:#45b08c}.does{fill:#482b25;stroke:#c9593f}
.arrow{stroke:#a9b4bf}.tip{fill:#a9b4bf}}
"""

BOXES = (
    # kind, left, top, width, name, below it
    ("given", 20, 20, 180, "plan", "names, no sizes"),
    ("given", 230, 20, 180, "preset", "sizes, no names"),
    ("given", 440, 20, 180, "model", "any nn.Module"),
    (
        "ours",
        20,
        116,
        600,
        "compile",
        "look, match, resolve, share_experts, divide, shard_data, order, check",
    ),
    ("ours", 170, 200, 300, "program", "applications, each with its file and line"),
    ("does", 20, 296, 140, "apply", "train"),
    ("does", 173, 296, 140, "simulate", "validate, plan"),
    ("does", 327, 296, 140, "prove", "verify"),
    ("does", 480, 296, 140, "show", "explain, export"),
)
ARROWS = ((110, 76, 116), (320, 76, 116), (530, 76, 116), (320, 172, 200))
FAN = (90, 243, 397, 550)
"""Where the program's readers stand."""


def drawn() -> str:
    """The SVG."""
    parts = [f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>']
    for x, start, end in ARROWS:
        parts += [f'<path class="arrow" d="M{x} {start}V{end - 4}"/>', tip(x, end)]
    parts.append(f'<path class="arrow" d="M320 256V276M{FAN[0]} 276H{FAN[-1]}"/>')
    for x in FAN:
        parts += [f'<path class="arrow" d="M{x} 276V292"/>', tip(x, 296)]
    for kind, x, y, width, name, below in BOXES:
        middle = x + width / 2
        parts += [
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="56" rx="6"/>',
            f'<text class="name" x="{middle}" y="{y + 24}">{name}</text>',
            f'<text class="small" x="{middle}" y="{y + 44}">{below}</text>',
        ]
    title = "<title>plan, preset and model are compiled to a program; apply, simulate, prove and show read it</title>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img">{title}<style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )


def tip(x: float, y: float) -> str:
    """An arrow's point that ends at y."""
    return f'<path class="tip" d="M{x - 5} {y - 8}h10l-5 8z"/>'


if __name__ == "__main__":
    (HERE / "flow.svg").write_text(drawn())
