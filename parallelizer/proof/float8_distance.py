"""How far a computation in float8 is from the same in full precision: a figure for each module, and no verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallelizer.language.plan import full_name
from parallelizer.proof.float8_tokens import LowPrecision
from parallelizer.proof.observe import Observation
from parallelizer.proof.rounding import relative_error


@dataclass(frozen=True)
class Distance:
    """Relative errors (Frobenius) of a module's output in the first step and of its weight's gradient, with what float8 has
    changed before it; None where there is none.
    """

    module: str
    recipe: str
    output: float | None
    gradient: float | None


def distances(rounded: Observation, full: Observation, precision: LowPrecision) -> Iterator[Distance]:
    """The distance of two unsharded runs, with and without float8, in the order of the plan's modules."""
    for module, recipe in precision.recipes.items():
        output = full.outputs[0].get(module)
        gradient = full.gradients[0].get(full_name(module, "weight"))
        yield Distance(
            module,
            recipe,
            None if output is None else relative_error(rounded.outputs[0].get(module), output),
            None
            if gradient is None
            else relative_error(rounded.gradients[0].get(full_name(module, "weight")), gradient),
        )
