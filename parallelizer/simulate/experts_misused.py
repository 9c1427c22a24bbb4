"""A step that `experts` stops: `does-not-run` for arguments that are something else than what its rule says, `routing-counts`
for the counts of another run.
"""

from __future__ import annotations

from parallelizer.compiler.observe.users_code import written_at
from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.language.routing import RoutingError
from parallelizer.styles.application import Program
from parallelizer.styles.experts.dispatch import ExpertsError


def experts_misused(error: BaseException, program: Program, module: str) -> Diagnostic | None:
    """What to say of a step that raised the error in a module; None where `experts` did not raise it."""
    if isinstance(error, RoutingError):
        return Diagnostic(
            "routing-counts",
            f"{program.routing.file} has the counts of another run: {error}",
            program.routing.span,
            "write the file with `train.write_routing` under this configuration, or set routing to balanced",
        )
    rule = next((a for a in program if a.slot == "experts" and a.module == module), None)
    if rule is None or not isinstance(error, ExpertsError):
        return None
    called = written_at(error)
    return Diagnostic(
        "does-not-run",
        f"the plan does not run: forward of {module or 'the root'} fails: {error}",
        rule.spans.get("ids", rule.rule.span),
        "let `tokens`, `ids` and `weights` name the arguments of the module's forward",
        related=(Related(called, "it is called here"),) if called else (),
    )
