"""Compiled plans of the small model, for the tests of rows."""

from __future__ import annotations

from functools import cache

from torch import nn

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.simulate.record.ledger import Collective
from parallelizer.styles.application import Program


@cache
def compiled(*overrides: str) -> tuple[Program, nn.Module]:
    """A program, and the model that it was compiled for, unsharded."""
    setup = from_config(*compose_config(overrides))
    model = setup.build_model()
    return setup.compile(model), model


def collective(
    module: str = "layers.0.wq",
    *,
    phase: str = "forward",
    axis: str = "tp",
    kind: str = "all_gather",
    payload: int = 8,
    rule: tuple[str, str, int] | None = None,
    ahead: bool = False,
) -> Collective:
    """One collective of two ranks, of which this one sends half the payload."""
    return Collective(phase, kind, axis, 2, payload, payload // 2, "float32", module, rule, ahead)
