"""Overrides that Hydra's grammar does not read, shown as they must be typed."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from parallelizer.diagnostics.diagnostic import Diagnostic, Span, one_line, quoted
from parallelizer.language.parse_rule import quoted_rules

RULES = ("rules", "parallel.rules")
"""Where rules are written on the command line."""


class OverrideSyntaxError(Exception):
    """An override that Hydra's grammar cannot read: the command line does not parse."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        self.diagnostic = diagnostic
        super().__init__(diagnostic)

    def __str__(self) -> str:
        return one_line(self.diagnostic)


def explain_override(override: str, reason: str, overrides: Sequence[str]) -> Diagnostic:
    """The diagnostic for an override that Hydra's grammar does not read."""
    name, equals, value = override.partition("=")
    if not equals:
        help_text = "write an override as key=value"
        if is_path(override):
            alone = f"`validate --quick {shlex.quote(override)}` checks the file alone"
            help_text = f"to check the plan with a model, write {shlex.quote(f'plan={override}')} ({alone})"
        elif any("rules=" in other for other in overrides):
            help_text = f"a rule's blanks need quotes: {quoted_rules('rules', 'layers.*: checkpoint')}"
        message = f"{quoted(override)} is not an override"
        return Diagnostic("override-syntax", message, override_span(override), help_text)
    if name.lstrip("+~") in RULES:
        message = "Hydra cannot read these rules without quotes"
        help_text = f"put each rule in quotes: {quoted_rules(name, _meant_rules(override, overrides))}"
    else:
        message = f"Hydra cannot read {quoted(value)}: {_plain(reason)}"
        if re.match(r"\s*\w+\s*\(", value):
            message = f"Hydra reads {quoted(value)} as a function call"
        typed = shlex.quote(f'{name}="{value}"') if "'" in value else f"\"{name}='{value}'\""
        help_text = f"put it in quotes: {typed}"
    return Diagnostic("override-syntax", message, value_span(override), help_text)


def is_path(word: str) -> bool:
    """Whether a word of the command line names a plan file."""
    return "=" not in word and (os.sep in word or word.endswith((".yaml", ".yml")))


def _meant_rules(override: str, overrides: Sequence[str]) -> str:
    """What stands between the brackets, put together again where the shell has cut it at its blanks."""
    words = list(overrides[list(overrides).index(override) :])
    end = next((at for at, word in enumerate(words) if word.rstrip().endswith("]")), 0)
    text = " ".join(words[: end + 1]).partition("=")[2].strip()
    return text.removeprefix("[").removesuffix("]").strip()


def _plain(reason: str) -> str:
    """The complaint of Hydra's parser in one line, without the override and the link to its grammar."""
    lines = [line for line in reason.split("\n") if line.strip(" ^")]
    own = [line for line in lines if not line.startswith(("See ", "Error parsing", "LexerNoViable"))]
    return own[0] if own else "a character that needs quotes"


def override_span(override: str) -> Span:
    """An override, whole."""
    return Span(f"<override {override}>", 1, 1, len(override) + 1)


def value_span(override: str) -> Span:
    """What stands behind its `=`."""
    value = override.partition("=")[2]
    start = len(override) - len(value) + 1
    return Span(f"<override {override}>", 1, start, start + max(len(value), 1))
