"""Writes a text to stdout while it is generated."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from parallelizer.training.data.tokenizer import Tokenizer

HELD = "�"


class TextStream:
    """Writes a text as it grows; on a terminal without control characters, because an untrained model
    produces them too. `SamplingJob.stream` makes it.
    """

    def __init__(self, tokenizer: Tokenizer, *, quiet: bool) -> None:
        self.tokenizer, self.quiet, self.text, self.shown = tokenizer, quiet, "", 0

    def show(self, tokens: Sequence[int]) -> None:
        """Write the new part of the text; an incomplete character is written later."""
        self.text = "" if self.quiet else self.tokenizer.decode(_visible(tokens, self.tokenizer.separator))
        if not self.text.endswith(HELD):
            self._write(self.text[self.shown :])

    def end(self) -> None:
        """Write the rest, and end the line."""
        self._write(self.text[self.shown :] + "\n" * (not self.quiet))

    def _write(self, text: str) -> None:
        if text:
            self.shown += len(text)
            sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()


def _visible(tokens: Sequence[int], separator: int) -> Sequence[int]:
    """Without the separator that begins a text which has no prompt."""
    return tokens[1:] if tokens and tokens[0] == separator else tokens


def printable(text: str) -> str:
    """With a terminal's control characters, but for line ends and tabs, as U+FFFD."""
    return "".join(c if c in "\n\t" or c.isprintable() else HELD for c in text)
