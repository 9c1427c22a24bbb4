"""Checks that a rule for a parameter and a rule for its module do not both place the parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.language.plan import full_name

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.diagnostics.diagnostic import Span
    from parallelizer.styles.application import Application


def placed_twice(state: Compilation) -> Iterator[Diagnostic]:
    """One style places a parameter; what is wrong in the same way is reported once for each pair of rules."""
    first: dict[str, Application] = {}
    seen: set[tuple[Span, Span]] = set()
    for application in state.applications:
        if application.slot != "params":
            continue
        for name in application.params:
            full = full_name(application.module, name)
            other = first.setdefault(full, application)
            pair = (other.rule.span, application.rule.span)
            if other is application or pair in seen:
                continue
            seen.add(pair)
            yield Diagnostic(
                "placed-twice",
                f"{application.style} and {other.style} both place {full}",
                application.rule.span,
                "name different parameters in one of the rules, or empty a slot with `none`",
                related=(Related(other.rule.span, f"the rule with {other.style}"),),
            )
