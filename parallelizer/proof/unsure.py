"""Findings that a proof may settle.

A flip along a split sequence that another flip undoes, or positions that a block counts for its own rows alone, look wrong and
are right. A check cannot know that, so its error counts unless the small form of the setup is proven.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import nn

from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, in_order
from parallelizer.styles.application import Program

UNSURE = frozenset({"needs-whole", "local-positions"})


def only_unsure(found: Iterable[Diagnostic]) -> bool:
    """Whether there are errors, and a proof may settle all of them."""
    errors = [one.code for one in found if one.severity == "error"]
    return bool(errors) and UNSURE.issuperset(errors)


def compile_unsure(setup: Setup, model: nn.Module) -> Program:
    """Compile a setup, with the errors that a proof may settle among the program's diagnostics. Raises PlanError for others."""
    try:
        return setup.compile(model)
    except PlanError as error:
        if not only_unsure(error.diagnostics):
            raise
        return setup.compile(model, force=True)


def settled(found: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The findings about a setup that is proven: what a check was not sure of is a note."""
    return in_order(
        dataclasses.replace(one, severity="note", help="nothing to do: the small form is proven with it")
        if one.code in UNSURE and one.severity == "error"
        else one
        for one in found
    )
