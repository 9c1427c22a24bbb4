"""A proof that failed, as a finding at the rule that governs the place."""

from __future__ import annotations

from parallelizer.diagnostics.diagnostic import Diagnostic
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


def not_equal(proof: Proof) -> Diagnostic:
    """What a failed proof found: at the line that mixes the rows of a batch, or at the rule that governs the place."""
    found = proof.divergence or Divergence("", "forward", None, None, _over(proof))
    if proof.mixed_rows is not None:
        message = f"{_axes(proof)}{found.description}: this line mixes the rows of the batch"
        axes = proof.broken_axes or [axis for axis, size in proof.mesh.sizes.items() if size > 1]
        help_text = MIXED_IN_MICROBATCHES if list(axes) == ["pp"] else MIXED
        return Diagnostic(CODE, message, proof.mixed_rows, help_text)
    span = found.rule.span if found.rule else None
    where = f"{found.phase}{f' of {found.module}' if found.module else ''}{f', on {found.axis}' if found.axis else ''}"
    governed = (
        f"this rule governs {found.module or 'the model'} there"
        if span
        else "no rule of the plan stands there: give it one, or mend the style"
    )
    help_text = f"the first difference in order of execution is in the {where}; {governed}"
    return Diagnostic(CODE, f"{_axes(proof)}{found.description}", span, help_text)


def _axes(proof: Proof) -> str:
    """By which axes the run differs, where the mesh has several."""
    if proof.broken_axes is None:
        return ""
    if not proof.broken_axes:
        return "every axis alone is proven, only together they are not: "
    return f"with {' or '.join(proof.broken_axes)} alone, every other axis at 1: "


def _over(proof: Proof) -> str:
    worst = proof.verdict.worst(1)
    if not worst or worst[0].passed:
        return "ranks that should hold the same value hold different bits"
    return f"the {worst[0].what} {worst[0].name} is over its bound".replace("  ", " ")
