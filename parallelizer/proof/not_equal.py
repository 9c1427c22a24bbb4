"""A proof that failed, as a finding at the rule that governs the place."""

from __future__ import annotations

from collections.abc import Iterable

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Related, Span
from parallelizer.language.plan import Mesh
from parallelizer.proof.divergence import Divergence
from parallelizer.proof.proof import Proof

CODE = "not-equal"

MIXED = (
    "a data rank has only its own rows: compute each row by itself (LayerNorm, GroupNorm), or over the rows of all ranks "
    "(torch.nn.SyncBatchNorm, parallelizer.sum_over_batch, torch.distributed.nn.functional.all_gather)"
)
MIXED_IN_MICROBATCHES = (
    "a microbatch of a pipeline has only some rows: compute each row by itself (LayerNorm, GroupNorm)"
)


DECIDED = (
    "this line decides by values of which a rank has a part: decide row by row with torch.where, or let all ranks decide alike "
    "(a maximum or a sum over the ranks of the axis first)"
)

DEPARTS = "here the ranks first differ"


class MixedRowsError(PlanError):
    """The unsharded run has other results if the rows of its batch stand in another order, so no data rank can have them."""


def mixed_rows(mesh: Mesh, span: Span) -> MixedRowsError:
    """For a forward or a loss whose line `span` makes a row's result depend on the row's place in the batch."""
    axes = [axis for axis, size in mesh.sizes.items() if size > 1]
    message = "with its rows in another order the unsharded run has other results: this line mixes the rows of the batch"
    return MixedRowsError([Diagnostic(CODE, message, span, _advice(axes))])


def rows_apart(axes: Iterable[str], what: str, span: Span | None) -> Diagnostic:
    """For a batch whose rows compute something else by themselves: `what`, and the line that mixes them."""
    message = f"{what}: this line mixes the rows of the batch, which ranks of {' and '.join(axes)} divide"
    return Diagnostic(CODE, message, span, _advice(axes))


def not_equal(proof: Proof) -> Diagnostic:
    """What a failed proof found: at the line that mixes the rows of a batch, or at the rule that governs the place."""
    found = proof.divergence or Divergence("", "forward", None, None, _over(proof))
    if proof.mixed_rows is not None:
        message = f"{_axes(proof)}{found.description}: this line mixes the rows of the batch"
        axes = proof.broken_axes or [axis for axis, size in proof.mesh.sizes.items() if size > 1]
        return Diagnostic(CODE, message, proof.mixed_rows, _advice(axes))
    if found.line is not None:
        message = f"{_axes(proof)}{found.description}"
        return Diagnostic(CODE, message, found.line, DECIDED)
    span = found.rule.span if found.rule else None
    where = f"{found.phase}{f' of {found.module}' if found.module else ''}{f', on {found.axis}' if found.axis else ''}"
    governed = (
        f"this rule governs {found.module or 'the model'} there"
        if span
        else "no rule of the plan applies there: add one, or correct the style"
    )
    help_text = f"the first difference in order of execution is in the {where}; {governed}"
    related = () if proof.departure is None else (Related(proof.departure, DEPARTS),)
    return Diagnostic(CODE, f"{_axes(proof)}{found.description}", span, help_text, related=related)


def _advice(axes: Iterable[str]) -> str:
    return MIXED_IN_MICROBATCHES if list(axes) == ["pp"] else MIXED


def _axes(proof: Proof) -> str:
    """By which axes the run differs, where the mesh has several."""
    if proof.broken_axes is None:
        return ""
    if not proof.broken_axes:
        return "every axis is proven alone, but their combination is not: "
    return f"with {' or '.join(proof.broken_axes)} alone, every other axis at 1: "


def _over(proof: Proof) -> str:
    worst = proof.verdict.worst(1)
    if not worst or worst[0].passed:
        return "ranks that should hold the same value hold different bits"
    return f"the {worst[0].what} {worst[0].name} is over its bound".replace("  ", " ")
