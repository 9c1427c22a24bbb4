"""The checks that run before the model runs: one file for each check, each a function from a compilation to
findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from parallelizer.compiler.checks.attention_covered import attention_covered
from parallelizer.compiler.checks.attention_heads import attention_heads
from parallelizer.compiler.checks.batch_size import batch_size
from parallelizer.compiler.checks.buffers import buffers
from parallelizer.compiler.checks.compiled_regions import compiled_regions
from parallelizer.compiler.checks.computed_tensors import computed_tensors
from parallelizer.compiler.checks.dealing import dealing
from parallelizer.compiler.checks.float8_experts import float8_experts
from parallelizer.compiler.checks.float8_gathers import float8_gathers
from parallelizer.compiler.checks.float8_inputs import float8_inputs
from parallelizer.compiler.checks.float8_linears import float8_linears
from parallelizer.compiler.checks.fsdp_shards import fsdp_shards
from parallelizer.compiler.checks.lazy_modules import lazy_modules
from parallelizer.compiler.checks.microbatch_entries import microbatch_entries
from parallelizer.compiler.checks.missing_inputs import missing_inputs
from parallelizer.compiler.checks.nested_attention import nested_attention
from parallelizer.compiler.checks.placed_twice import placed_twice
from parallelizer.compiler.checks.positions import positions
from parallelizer.compiler.checks.running_statistics import running_statistics
from parallelizer.compiler.checks.sequence_length import sequence_length
from parallelizer.compiler.checks.tied_parameters import tied_parameters
from parallelizer.compiler.checks.ulysses_degree import ulysses_degree
from parallelizer.compiler.checks.unreduced_gradients import unreduced_gradients
from parallelizer.compiler.checks.unsharded_share import unsharded_share
from parallelizer.compiler.checks.unused_axes import unused_axes
from parallelizer.compiler.observe.families import family_check

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.diagnostics.diagnostic import Diagnostic

FIRST: tuple[Callable[[Compilation], Iterable[Diagnostic]], ...] = (lazy_modules, computed_tensors)
"""What must hold before rules are matched."""

CHECKS: tuple[Callable[[Compilation], Iterable[Diagnostic]], ...] = (
    unused_axes,
    placed_twice,
    tied_parameters,
    unreduced_gradients,
    missing_inputs,
    buffers,
    batch_size,
    microbatch_entries,
    sequence_length,
    dealing,
    fsdp_shards,
    attention_heads,
    ulysses_degree,
    positions,
    family_check,
    running_statistics,
    unsharded_share,
    attention_covered,
    nested_attention,
    compiled_regions,
    float8_linears,
    float8_experts,
    float8_gathers,
    float8_inputs,
)
"""In the order they run; each sees everything, none sees another's findings."""
