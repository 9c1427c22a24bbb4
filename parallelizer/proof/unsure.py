"""Findings that a proof may settle.

A flip along a split sequence that another flip undoes, or positions that a block counts for its own rows alone, look wrong and
are right. A check cannot know that, so its error counts unless the small form of the setup is proven; where no proof is made, it
is a warning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from parallelizer.diagnostics.diagnostic import Diagnostic, in_order

UNSURE = frozenset({"needs-whole", "local-positions", "fused-features", "other-size"})
"""The codes of errors that a proof may settle."""

VERIFY = "prove that it is right as it is: `parallelizer verify` with the same overrides"
ASSERT = "prove that it is right as it is: `parallelizer.testing.assert_equivalent`"
"""How to prove a setup, and a model that has none."""


def only_unsure(found: Iterable[Diagnostic]) -> bool:
    """Whether there are errors, and a proof may settle all of them."""
    errors = [one.code for one in found if one.severity == "error"]
    return bool(errors) and UNSURE.issuperset(errors)


def refused(found: Iterable[Diagnostic]) -> bool:
    """Whether there are errors that no proof may settle."""
    return any(one.severity == "error" and one.code not in UNSURE for one in found)


def settled(found: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The findings about a setup that is proven: what a check was not sure of is a note."""
    return in_order(
        dataclasses.replace(one, severity="note", help="nothing to do: the small form is proven with it")
        if one.code in UNSURE and one.severity == "error"
        else one
        for one in found
    )


def doubted(found: Iterable[Diagnostic], prove: str = VERIFY) -> tuple[Diagnostic, ...]:
    """The findings about a setup of which no proof is made: what a check was not sure of is a warning, whose help says how
    to `prove` it.
    """
    return in_order(
        dataclasses.replace(one, severity="warning", help=f"{one.help or 'mend it'}; or {prove}")
        if one.code in UNSURE and one.severity == "error"
        else one
        for one in found
    )
