"""What a step tells that was run before the real one: every check of a followed and of a traced step, one file each.

A followed step shows what is wrong in silence, a traced step what a plan wastes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from parallelizer.diagnostics.diagnostic import Diagnostic, has_errors
from parallelizer.simulate.checks.attention_shape import attention_shape
from parallelizer.simulate.checks.compile_not_traced import compile_not_traced
from parallelizer.simulate.checks.costly_redistribution import costly_redistribution
from parallelizer.simulate.checks.does_not_run import does_not_run
from parallelizer.simulate.checks.equal_random import equal_random
from parallelizer.simulate.checks.float8_called import float8_called
from parallelizer.simulate.checks.float8_rows import float8_rows
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.checks.fused_features import fused_features
from parallelizer.simulate.checks.half_sequence_parallel import half_sequence_parallel
from parallelizer.simulate.checks.large_root_unit import large_root_unit
from parallelizer.simulate.checks.layout_mismatch import layout_mismatch
from parallelizer.simulate.checks.left_out import left_out
from parallelizer.simulate.checks.local_attention import local_attention
from parallelizer.simulate.checks.local_positions import local_positions
from parallelizer.simulate.checks.missing_buffers import missing_buffers
from parallelizer.simulate.checks.multi_hop_redistribution import multi_hop_redistribution
from parallelizer.simulate.checks.needs_whole import needs_whole
from parallelizer.simulate.checks.optimizer_collectives import optimizer_collectives
from parallelizer.simulate.checks.other_size import other_size
from parallelizer.simulate.checks.redundant_redistribution import redundant_redistribution
from parallelizer.simulate.checks.replicated_logits import replicated_logits
from parallelizer.simulate.checks.replicated_sum import replicated_sum
from parallelizer.simulate.checks.sharded_logits import sharded_logits
from parallelizer.simulate.checks.small_fsdp_units import small_fsdp_units
from parallelizer.simulate.checks.traced_step import Traced
from parallelizer.simulate.checks.unequal_random import unequal_random
from parallelizer.simulate.checks.varying_gradient import varying_gradient
from parallelizer.simulate.checks.varying_loss import varying_loss
from parallelizer.simulate.trace_failed import fails_without_the_plan

FollowedCheck = Callable[[Followed], Iterable[Diagnostic]]

ON_THE_WAY: tuple[FollowedCheck, ...] = (
    layout_mismatch,
    replicated_sum,
    local_attention,
    missing_buffers,
    local_positions,
    fused_features,
    needs_whole,
    attention_shape,
)
"""Tensors that lie otherwise than they are taken to lie."""

FAILED: tuple[FollowedCheck, ...] = (left_out, sharded_logits, does_not_run)
"""Why the step raised: the first of these that knows. Asked only where nothing of the above was found, since a tensor that
lies otherwise than it is taken to lie fails somewhere further on.
"""

AT_THE_END: tuple[FollowedCheck, ...] = (varying_gradient, varying_loss)
"""What a step that ran to its end has come to."""

ALWAYS: tuple[FollowedCheck, ...] = (equal_random,)

TRACED: tuple[Callable[[Traced], Iterable[Diagnostic]], ...] = (
    redundant_redistribution,
    replicated_logits,
    half_sequence_parallel,
    small_fsdp_units,
    large_root_unit,
    optimizer_collectives,
    multi_hop_redistribution,
    costly_redistribution,
    compile_not_traced,
    float8_called,
    float8_rows,
)
"""In the order they run; each sees everything, none sees another's findings."""


def check_followed(followed: Followed) -> tuple[Diagnostic, ...]:
    """Every finding about a followed step."""
    found = [one for check in ON_THE_WAY for one in check(followed)]
    if followed.flow.failure is None:
        found += [one for check in AT_THE_END for one in check(followed)]
        found = found or list(other_size(followed))  # what is found otherwise makes other sizes too
    elif followed.alone is not None:
        found.append(fails_without_the_plan(followed.alone, followed.places))
    elif not found:
        reasons = (one for check in FAILED for one in check(followed))
        found.append(next(iter(reasons)))
    if followed.alone is None and has_errors(found):  # these are what comes of it
        found = list(unequal_random(followed)) or found
    return (*found, *(one for check in ALWAYS for one in check(followed)))


def check_traced(traced: Traced) -> tuple[Diagnostic, ...]:
    """Every finding about a traced step; those of one kind about one rule are one."""
    return tuple(one for check in TRACED for one in check(traced))
