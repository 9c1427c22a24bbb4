"""A step that `experts` stops: `does-not-run` for arguments that are something else than what its rule says, `routing-counts`
for the counts of another run.
"""

from __future__ import annotations

from parallelizer.compiler.observe.users_code import written_at
from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.language.routing import RoutingError
from parallelizer.styles.application import Program
from parallelizer.styles.experts.dispatch import ExpertsError

PARAMETERS = (
    "`params` names the dimension of each parameter along which the experts are counted; and the forward must take any number of "
    "tokens, each with one expert"
)

_SIZES = (
    "Attempting to broadcast",
    "must match",
    "must have same reduction dim",
    "cannot be multiplied",
    "is invalid for input of size",
)
"""What torch says of tensors whose sizes do not fit, which real tensors would not do either."""


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
    refused = error if isinstance(error, ExpertsError) else None
    if rule is None or not (refused or any(words in str(error) for words in _SIZES)):
        return None
    called = written_at(error)
    return Diagnostic(
        "does-not-run",
        f"the plan does not run: forward of {module or 'the root'} fails: {refused.what if refused else _first_line(error)}",
        rule.spans.get("ids" if refused else "params", rule.rule.span),
        refused.remedy if refused else PARAMETERS,
        related=(Related(called, "it is called here" if refused else "it fails here"),) if called else (),
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
