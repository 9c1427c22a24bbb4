"""Single-character typos, by a rule that anyone can repeat.

In a word of n characters: every deletion (n), every swap of two neighbours that differ (up to n - 1), and at
each of the n characters a substitution and at each of the n + 1 gaps an insertion, `draws` times each, of a
character drawn evenly from the 95 printable ones of ASCII by a generator seeded with the seed, the file's name
and the place. Typos that give the same text are one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.typos.words import Word

PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))


@dataclass(frozen=True)
class Typo:
    """A word and how it came to be spelt; `how` is deletion, swap, substitution or insertion."""

    word: Word
    how: str
    spelt: str

    def in_text(self, text: str) -> str:
        """The file's text with the typo in it."""
        lines = text.split("\n")
        line, start = lines[self.word.line], self.word.column
        lines[self.word.line] = line[:start] + self.spelt + line[start + len(self.word.text) :]
        return "\n".join(lines)


def typos(word: Word, file: str, seed: int, draws: int) -> list[Typo]:
    """The typos in a word, each once."""
    found: dict[str, Typo] = {}
    for how, spelt in _spellings(word, random.Random(f"{seed}:{file}:{word.line}:{word.column}"), draws):
        if spelt != word.text:
            found.setdefault(spelt, Typo(word, how, spelt))
    return list(found.values())


def _spellings(word: Word, rng: random.Random, draws: int) -> Iterator[tuple[str, str]]:
    text = word.text
    for at in range(len(text)):
        yield "deletion", text[:at] + text[at + 1 :]
    for at in range(len(text) - 1):
        yield "swap", text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    for at in range(len(text)):
        for _ in range(draws):
            yield "substitution", text[:at] + rng.choice(PRINTABLE) + text[at + 1 :]
    for at in range(len(text) + 1):
        for _ in range(draws):
            yield "insertion", text[:at] + rng.choice(PRINTABLE) + text[at:]
