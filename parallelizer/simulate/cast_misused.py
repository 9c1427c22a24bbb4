"""`precision-cast`: a forward that does something with an input in float8 that only its linears in float8 could take."""

from __future__ import annotations

import traceback

from parallelizer.compiler.observe.running_module import within
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.styles.application import Program
from parallelizer.styles.float8.recipes import casts_inputs


def cast_misused(error: BaseException, program: Program, module: str) -> Diagnostic | None:
    """What to say of a step that failed in torchao, inside of a module whose input is cast to float8; None for any other."""
    files = (frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__))
    around = [a for a in program if casts_inputs(a) and within(module, a.module)]
    if not around or not any("/torchao/float8/" in file for file in files):
        return None
    where = around[-1]
    return Diagnostic(
        "precision-cast",
        f"the input of {where.module or 'the root'} is in float8, and {module or 'the root'} uses it, which is no linear in "
        "float8",
        where.spans.get("cast", where.rule.span),
        "put all linears that take the input in float8, or remove `cast`",
    )
