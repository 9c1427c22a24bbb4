"""The code of a Markdown page, block by block: fenced ones, and indented ones that are commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

COMMANDS = ("python", "parallelizer", "torchrun", "srun", "make", "pip", "uvx", "pipx")
"""What a line begins with that is a command of ours, or starts one."""

_OPT_OUT = re.compile(r"<!-- not run: (?P<reason>.+?) -->")
_FENCE = re.compile(r"^(?P<indent> {0,8})(?P<ticks>`{3,})(?P<info>[^`]*)$")


@dataclass(frozen=True)
class Block:
    """One block: where it stands, its language (`commands` for an indented one), and its text.

    `reason` is why it is not run, from a comment above it: `<!-- not run: it needs a cluster -->`.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """The commands of a console or indented block, one string each, without prompts."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            return [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip().split(" ")[0] in COMMANDS]

    def shown(self) -> dict[str, str]:
        """What a console block shows below each command."""
        return dict(re.findall(r"^\$ (.*)\n?((?:(?!\$ ).*\n?)*)", self.text, re.M))


def blocks_of(path: Path) -> list[Block]:
    """Every block of a page, in order."""
    return list(_blocks(str(path.relative_to(ROOT)), path.read_text().splitlines()))


def _blocks(page: str, lines: list[str]) -> Iterator[Block]:
    reason: str | None = None
    at = 0
    while at < len(lines):
        line = lines[at]
        if found := _OPT_OUT.search(line):
            reason = found["reason"]
        elif fence := _FENCE.match(line):
            start = at + 1
            at = start
            while at < len(lines) and lines[at].strip() != fence["ticks"]:
                at += 1
            indent = len(fence["indent"])
            text = "".join(f"{each[indent:]}\n" for each in lines[start:at])
            yield Block(page, start + 1, fence["info"].strip().split(" ")[0], text, reason)
            reason = None
        elif line.startswith("    ") and not line.startswith("     ") and not (at and lines[at - 1].strip()):
            start = at
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            text = "".join(f"{each[4:]}\n" for each in lines[start:at])
            block = Block(page, start + 1, "commands", text, reason)
            if block.commands():
                yield block
            reason = None
            continue
        elif line.strip():
            reason = None
        at += 1
