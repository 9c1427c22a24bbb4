"""Where a configuration says what findings about a step name."""

from __future__ import annotations

from dataclasses import dataclass

from parallelizer.diagnostics.diagnostic import Span


@dataclass(frozen=True)
class Places:
    """The places of the model's class, of its loss, of the arguments that the command line gives it, and of the optimizer's
    config; empty for a model without a configuration.
    """

    model: Span | None = None
    loss: Span | None = None
    arguments: tuple[Span, ...] = ()
    optimizer: Span | None = None
