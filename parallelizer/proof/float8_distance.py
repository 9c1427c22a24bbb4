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
    changed before it; None where there is none. `experts`: the module holds stacked experts, and the error is the largest of a
    parameter's gradient.
    """

    module: str
    recipe: str
    output: float | None
    gradient: float | None
    experts: bool = False


def distances(rounded: Observation, full: Observation, precision: LowPrecision) -> Iterator[Distance]:
    """The distance of two unsharded runs, with and without float8, in the order of the plan's modules."""
    for module, recipe in precision.recipes.items():
        output = full.outputs[0].get(module)
        stacked = [n for n in full.gradients[0] if n.rpartition(".")[0] == module]
        names = stacked if module in precision.experts else [full_name(module, "weight")]
        errors = [
            relative_error(rounded.gradients[0].get(name), gradient)
            for name in names
            if (gradient := full.gradients[0].get(name)) is not None
        ]
        yield Distance(
            module,
            recipe,
            None if output is None else relative_error(rounded.outputs[0].get(module), output),
            max(errors, default=None),
            module in precision.experts,
        )
