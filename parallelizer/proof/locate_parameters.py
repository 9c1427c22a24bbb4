"""Parameters from their initial values over their gradients to their updates, and buffers: whole tensors, which
must be the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from parallelizer.language.plan import DATA_AXES, EXPERT, EXPERT_SHARDS, Mesh, full_name
from parallelizer.proof.compare import unequal
from parallelizer.proof.describe import axes_of, data_first, describe, factor_words, ratio
from parallelizer.proof.divergence import Comparison, Divergence, at_step, between, found, on_ranks
from parallelizer.proof.observe import STEPS
from parallelizer.proof.rounding import relative_error
from parallelizer.proof.slices import Locals, above_one, line, separating_axis


def initial_values(case: Comparison) -> Iterator[Divergence]:
    """Parameters that begin with other values than the reference's, or than their copies on other ranks."""
    for name, whole in case.reference.start.items():
        mine = case.ranks[0].start.get(name)
        if relative_error(mine, whole) > 0:
            axis = _one_axis(case, name)
            yield found(
                case,
                name,
                "initialization",
                axis,
                f"the initial value of {name} {describe(mine, whole, case.mesh)}",
            )
    for key, (a, b) in unequal(case.ranks, 0).items():
        name, axis = key.split(" ")[0], between(case.mesh, a, b)
        yield found(
            case,
            name,
            "initialization",
            axis,
            f"the initial value of {name} differs between rank {b} and rank {a}, which hold copies",
        )


def gradients(case: Comparison, step: int) -> Iterator[Divergence]:
    """Every output is right and a parameter's gradient is not: what reduces it is wrong."""
    mesh, compared = case.mesh, case.compared("gradient", step)
    references = case.reference.gradients[step]
    factors = {n: ratio(case.ranks[0].gradients[step].get(n), g) for n, g in references.items()}
    everywhere = len({None if f is None else round(f, 6) for f in factors.values()}) == 1
    for name, whole in reversed(list(references.items())):
        every = [r.gradients[step].get(name) for r in case.ranks]
        mine = every[0]
        if compared[name].passed:
            continue
        what = f"the gradient of {name}{at_step(step)}"
        axis = (
            None
            if whole is None
            else _summing_axis(whole, every, mesh, max(100 * compared[name].bound, 1e-12))
        )
        if axis:
            text = f"{what} differs from rank to rank of {axis}, and its sum is right: its reduction over {axis} is missing"
            yield found(case, name, "backward", axis, text)
        factor = factors[name]
        if factor is None:
            yield found(
                case, name, "backward", _one_axis(case, name), f"{what} {describe(mine, whole, mesh)}"
            )
            continue
        many, few = (_axis_of(case, name, by, everywhere) for by in (factor, 1 / factor))
        others = ", as every other is" if everywhere and len(factors) > 1 else ""
        if many:
            text = f"{what} is {many} ({round(factor)}) times the reference{others}: it is summed over {many} once too often"
        elif few:
            data = few.split(" x ")[0] in DATA_AXES
            why = (
                f"it is averaged over {few} and not summed"
                if data and everywhere
                else f"its reduction over {few} is missing"
            )
            text = f"{what} is 1/{few} (1/{round(1 / factor)}) of the reference{others}: {why}"
        else:
            text = f"{what} is {factor_words(factor, mesh)} the reference{others}"
        yield found(case, name, "backward", many or few, text)


def _axis_of(case: Comparison, name: str, factor: float, everywhere: bool) -> str | None:
    """The axis, or product of axes, whose size is the factor; of an expert that is shared out, one that shares it out."""
    shared = {full_name(a.module, n) for a in case.program.of_slot("experts") for n in a.params}
    if name in shared and not everywhere:
        axes = [axis for axis in (EXPERT, EXPERT_SHARDS) if case.mesh.size_of(axis) == round(factor, 6) > 1]
        if axes:
            return axes[0]
    return data_first(axes_of(factor, case.mesh), everywhere)


def updates(case: Comparison, step: int) -> Iterator[Divergence]:
    """The gradients and their norm are right, and a parameter is not what the step should have made it."""
    still = _standing_still(case, step)
    compared = case.compared("parameter", step)
    for name, whole in case.reference.parameters[step].items():
        mine = case.ranks[0].parameters[step].get(name)
        if not compared[name].passed:
            if still:
                ranks = f"rank{'s' if len(still) > 1 else ''} {', '.join(map(str, still))}"
                text = f"{name} is as it was before step {step} on {ranks}: no optimizer step was made there"
                yield found(case, name, "optimizer", separating_axis(still, case.mesh), text)
            words = describe(mine, whole, case.mesh)
            text = (
                f"{name} after step {step} {words}, and its gradient is right: the optimizer's step differs"
            )
            yield found(case, name, "optimizer", None, text)
    for key, (a, b) in unequal(case.ranks, step + 1).items():
        name = key.split(" ")[0]
        why = f": rank {', '.join(map(str, still))} made no optimizer step" if still else ""
        text = (
            f"{name} after step {step} has other bits on rank {b} than on rank {a}, which holds a copy{why}"
        )
        yield found(case, name, "optimizer", between(case.mesh, a, b), text)


def states(case: Comparison) -> Iterator[Divergence]:
    """Every parameter is right after the last step, and what the optimizer keeps of it is not."""
    compared = case.compared("optimizer state", STEPS - 1)
    for key, whole in case.reference.states.items():
        name, _, state = key.partition(":")
        if not compared[key].passed:
            words = describe(case.ranks[0].states.get(key), whole, case.mesh)
            text = (
                f"the optimizer's {state} of {name} {words} after the last step, and the parameter is right"
            )
            yield found(case, name, "optimizer", None, text)


def buffers(case: Comparison) -> Iterator[Divergence]:
    """Model buffers that are not what they were, or what the reference made of them."""
    bounds = {d.name: d.bound for d in case.verdict.of("buffer") if not d.passed}
    for name, whole in case.reference.buffers.items():
        if name not in bounds:
            continue
        wrong = [
            rank
            for rank, seen in enumerate(case.ranks)
            if not relative_error(seen.buffers.get(name), whole) <= bounds[name]
        ]
        if wrong:
            words = describe(case.ranks[wrong[0]].buffers.get(name), whole, case.mesh)
            text = f"the buffer {name} {words} {on_ranks(wrong, case.mesh)} after the last step: it was not put back"
            yield found(case, name, "evaluation", separating_axis(wrong, case.mesh), text)


def _summing_axis(whole: torch.Tensor, mine: Locals, mesh: Mesh, bound: float) -> str | None:
    """The axis over which the ranks' whole gradients, not all the same, sum to the right one."""
    for axis in above_one(mesh):
        terms = [t for r in line(mesh, 0, axis) if (t := mine[r]) is not None]
        alike = all(relative_error(t, terms[0]) <= bound for t in terms)
        if (
            len(terms) == mesh.sizes[axis]
            and not alike
            and relative_error(torch.stack(terms).sum(0), whole) <= bound
        ):
            return axis
    return None


def _standing_still(case: Comparison, step: int) -> list[int]:
    """The ranks on which no parameter has changed in this step, where it has on others."""
    still = [r for r, seen in enumerate(case.ranks) if seen.bits[step] == seen.bits[step + 1]]
    return still if len(still) < len(case.ranks) else []


def _one_axis(case: Comparison, name: str) -> str | None:
    """The axis that a parameter's module is parallel on, where it is one only."""
    module = name.rpartition(".")[0]
    axes = {
        a for use in case.program if use.module == module and use.slot == "params" for a in use.axes
    } or set(above_one(case.mesh))
    return next(iter(axes)) if len(axes) == 1 else None
