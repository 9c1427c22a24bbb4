"""`precision-not-called`: a linear in float8 whose weight other code multiplies, which stays in its own dtype."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.checks.traced_step import Traced, modules_text


def float8_called(traced: Traced) -> Iterator[Diagnostic]:
    """Every linear that a rule puts in float8 is called in a forward."""
    linears = traced.program.of_slot("precision")
    if not linears or traced.calls is None:
        return
    called = traced.calls.by_module
    for alike in grouped([a for a in linears if a.module not in called], lambda a: a.rule.span):
        yield Diagnostic(
            "precision-not-called",
            f"no forward calls {modules_text(alike)}, so that nothing is computed in float8 there",
            alike[0].rule.span,
            "another module reads the weight, or the step does not use it: leave it out of the glob",
        )
