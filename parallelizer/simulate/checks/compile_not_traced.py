"""`compile-not-traced`: what is compiled was traced as it runs without."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.checks.traced_step import Traced, modules_text


def compile_not_traced(traced: Traced) -> Iterator[Diagnostic]:
    """Modules run compiled, and the figures are of what they do otherwise."""
    compiled = traced.program.of_slot("compile")
    if compiled:
        yield Diagnostic(
            "compile-not-traced",
            f"{modules_text(compiled)} {'are' if len(compiled) > 1 else 'is'} compiled, but the dry run traces the code without "
            "compiling it: compiled code may need less memory",
            compiled[0].rule.span,
            "the collectives and the parameters do not change",
            "note",
        )
