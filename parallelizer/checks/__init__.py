"""What can be known to be wrong before the model runs: one file per check, each a function from a compilation
to findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from parallelizer.checks.attention_covered import attention_covered
from parallelizer.checks.attention_heads import attention_heads
from parallelizer.checks.batch_size import batch_size
from parallelizer.checks.buffers import buffers
from parallelizer.checks.compiled_regions import compiled_regions
from parallelizer.checks.dealing import dealing
from parallelizer.checks.fsdp_shards import fsdp_shards
from parallelizer.checks.lazy_modules import lazy_modules
from parallelizer.checks.missing_inputs import missing_inputs
from parallelizer.checks.nested_attention import nested_attention
from parallelizer.checks.placed_twice import placed_twice
from parallelizer.checks.positions import positions
from parallelizer.checks.pretrained import pretrained
from parallelizer.checks.running_statistics import running_statistics
from parallelizer.checks.sequence_length import sequence_length
from parallelizer.checks.tied_parameters import tied_parameters
from parallelizer.checks.ulysses_degree import ulysses_degree
from parallelizer.checks.unreduced_gradients import unreduced_gradients
from parallelizer.checks.unsharded_share import unsharded_share
from parallelizer.checks.unused_axes import unused_axes

if TYPE_CHECKING:
    from parallelizer.diagnostics import Diagnostic
    from parallelizer.program import Compilation

FIRST: tuple[Callable[[Compilation], Iterator[Diagnostic]], ...] = (lazy_modules,)
"""What must hold before rules are matched."""

CHECKS: tuple[Callable[[Compilation], Iterator[Diagnostic]], ...] = (
    unused_axes,
    placed_twice,
    tied_parameters,
    unreduced_gradients,
    missing_inputs,
    buffers,
    batch_size,
    sequence_length,
    dealing,
    fsdp_shards,
    attention_heads,
    ulysses_degree,
    positions,
    pretrained,
    running_statistics,
    unsharded_share,
    attention_covered,
    nested_attention,
    compiled_regions,
)
"""In the order they run; each sees everything, none sees another's findings."""
