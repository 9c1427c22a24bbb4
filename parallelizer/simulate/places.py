"""Where a configuration says what findings about a step name."""

from __future__ import annotations

from dataclasses import dataclass

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import Buffer


@dataclass(frozen=True)
class Places:
    """The places of the model's class, of its loss, of the arguments that the command line gives it, and of the optimizer's
    config; empty for a model without a configuration. `made` are the batch entries that the plan makes.
    """

    model: Span | None = None
    loss: Span | None = None
    arguments: tuple[Span, ...] = ()
    optimizer: Span | None = None
    made: tuple[Buffer, ...] = ()
