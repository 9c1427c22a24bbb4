"""Where a run first differs, in the order of execution, and how, in words: initial values, outputs, loss,
gradients, norm, updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from parallelizer.compiler import Program
from parallelizer.plan import DATA_AXES, Mesh, Rule
from parallelizer.styles.packing import Packing
from parallelizer.verify.compare import Verdict, relative_error, unequal
from parallelizer.verify.describe import axes_of, data_first, describe, factor_words, ratio
from parallelizer.verify.observe import STEPS, Observation
from parallelizer.verify.slices import (
    Locals,
    above_one,
    line,
    partial_axis,
    separating_axis,
    slices,
    wrong_ranks,
)


@dataclass(frozen=True)
class Divergence:
    """The first module in order of execution whose value differs; `module` is empty for what belongs to no
    one module.

    `phase` is initialization, forward, loss, backward, clip, optimizer or evaluation.
    """

    module: str
    phase: str
    axis: str | None
    rule: Rule | None
    description: str


@dataclass(frozen=True)
class Comparison:
    """The two sides, with the bounds of gradients and of everything else."""

    program: Program
    reference: Observation
    ranks: Sequence[Observation]
    verdict: Verdict

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @property
    def bound(self) -> float:
        return max((d.bound for d in self.verdict.of("gradient")), default=1e-9)

    def bounds(self, what: str, step: int) -> dict[str, float]:
        return {d.name: d.bound for d in self.verdict.of(what) if d.step == step}


def locate(
    program: Program, reference: Observation, ranks: Sequence[Observation], verdict: Verdict
) -> Divergence | None:
    """The first difference between the reference and the ranks; None when nothing differs."""
    return next(_all(Comparison(program, reference, ranks, verdict)), None)


def _all(case: Comparison) -> Iterator[Divergence]:
    yield from _initial_values(case)
    for step in range(STEPS):
        yield from _outputs(case, step, "forward", "")
        right = all(d.passed for d in case.verdict.of("loss") if d.step == step)
        yield from _output_gradients(case, step, right)
        if not right:
            reference, run = case.reference.losses[step], case.ranks[0].losses[step]
            yield Divergence(
                "",
                "loss",
                None,
                None,
                f"the loss{_at(step)} is {run:.9g}, the reference {reference:.9g}, and every module's "
                "output is right: the sums of losses and of tokens do not go over all data ranks once",
            )
        yield from _gradients(case, step)
        yield from _norm(case, step)
        yield from _updates(case, step)
    yield from _outputs(case, STEPS, "evaluation", " in evaluation")
    yield from _buffers(case)


def _at(step: int) -> str:
    return f" of step {step}" if step else ""


def _initial_values(case: Comparison) -> Iterator[Divergence]:
    for name, whole in case.reference.start.items():
        mine = case.ranks[0].start.get(name)
        if relative_error(mine, whole) > 0:
            axis = _one_axis(case, name)
            yield _found(
                case,
                name,
                "initialization",
                axis,
                f"the initial value of {name} {describe(mine, whole, case.mesh)}",
            )
    for key, (a, b) in unequal(case.ranks, 0).items():
        name, axis = key.split(" ")[0], _between(case.mesh, a, b)
        yield _found(
            case,
            name,
            "initialization",
            axis,
            f"the initial value of {name} is another on rank {b} than on rank {a}, which holds a copy",
        )


def _outputs(case: Comparison, step: int, phase: str, when: str) -> Iterator[Divergence]:
    for path, whole in case.reference.outputs[step].items():
        mine = [r.outputs[step].get(path) for r in case.ranks]
        packing = _packing(case.program, path)
        wrong = wrong_ranks(whole, mine, case.mesh, case.bound, packing)
        if wrong:
            axis, words = _difference(whole, mine, wrong, case, packing)
            yield _found(case, f"{path}.", phase, axis, f"the output of {path}{when or _at(step)} {words}")


def _output_gradients(case: Comparison, step: int, loss_is_right: bool) -> Iterator[Divergence]:
    for position, (path, whole) in enumerate(case.reference.output_gradients[step].items()):
        mine = [r.output_gradients[step].get(path) for r in case.ranks]
        if any(m is None for m in mine):
            continue
        packing = _packing(case.program, path)
        wrong = wrong_ranks(whole, mine, case.mesh, case.bound, packing)
        # A gradient that is still to be summed over an axis is right for its place.
        if not wrong or partial_axis(whole, mine, case.mesh, 10 * case.bound) in ("tp", "ep"):
            continue
        axis, words = _difference(whole, mine, wrong, case, packing)
        cause = (
            ""
            if loss_is_right or position
            else "; the loss is wrong, and every output is right: look at the labels and at the loss"
        )
        yield _found(
            case,
            f"{path}.",
            "backward",
            axis,
            f"the gradient of the output of {path}{_at(step)} {words}{cause}",
        )


def _gradients(case: Comparison, step: int) -> Iterator[Divergence]:
    """Every output is right and a parameter's gradient is not: what reduces it is wrong."""
    mesh, bounds = case.mesh, case.bounds("gradient", step)
    references = case.reference.gradients[step]
    factors = {n: ratio(case.ranks[0].gradients[step].get(n), g) for n, g in references.items()}
    everywhere = len({None if f is None else round(f, 6) for f in factors.values()}) == 1
    for name, whole in reversed(list(references.items())):
        every = [r.gradients[step].get(name) for r in case.ranks]
        mine = every[0]
        if max(relative_error(m, whole) for m in every) <= bounds.get(name, 0.0):
            continue
        what = f"the gradient of {name}{_at(step)}"
        axis = None if whole is None else _summing_axis(whole, every, mesh, max(100 * bounds[name], 1e-12))
        if axis:
            text = f"{what} differs from rank to rank of {axis}, and its sum is right: its reduction over {axis} is missing"
            yield _found(case, name, "backward", axis, text)
        factor = factors[name]
        if factor is None:
            yield _found(
                case, name, "backward", _one_axis(case, name), f"{what} {describe(mine, whole, mesh)}"
            )
            continue
        many, few = (
            data_first(axes_of(factor, mesh), everywhere),
            data_first(axes_of(1 / factor, mesh), everywhere),
        )
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
        yield _found(case, name, "backward", many or few, text)


def _norm(case: Comparison, step: int) -> Iterator[Divergence]:
    if any(d.step == step and not d.passed for d in case.verdict.of("gradient norm")):
        run, reference = case.ranks[0].norms[step], case.reference.norms[step]
        side = "some are counted more than once" if run > reference else "some are left out"
        text = f"the gradient norm{_at(step)} is {run:.9g}, the reference's {reference:.9g}, and every gradient is right: {side}"
        yield Divergence("", "clip", None, None, text)


def _updates(case: Comparison, step: int) -> Iterator[Divergence]:
    still = _standing_still(case, step)
    bounds = case.bounds("parameter", step)
    for name, whole in case.reference.parameters[step].items():
        mine = case.ranks[0].parameters[step].get(name)
        if relative_error(mine, whole) > bounds.get(name, 0.0):
            if still:
                ranks = f"rank{'s' if len(still) > 1 else ''} {', '.join(map(str, still))}"
                text = f"{name} is as it was before step {step} on {ranks}: no optimizer step was made there"
                yield _found(case, name, "optimizer", separating_axis(still, case.mesh), text)
            words = describe(mine, whole, case.mesh)
            text = f"{name} after step {step} {words}, and its gradient is right: the optimizer's step is another"
            yield _found(case, name, "optimizer", None, text)
    for key, (a, b) in unequal(case.ranks, step + 1).items():
        name = key.split(" ")[0]
        why = f": rank {', '.join(map(str, still))} made no optimizer step" if still else ""
        text = (
            f"{name} after step {step} has other bits on rank {b} than on rank {a}, which holds a copy{why}"
        )
        yield _found(case, name, "optimizer", _between(case.mesh, a, b), text)


def _buffers(case: Comparison) -> Iterator[Divergence]:
    for name, whole in case.reference.buffers.items():
        wrong = [r for r, seen in enumerate(case.ranks) if relative_error(seen.buffers.get(name), whole) > 0]
        if wrong:
            words = describe(case.ranks[wrong[0]].buffers.get(name), whole, case.mesh)
            text = (
                f"the buffer {name} {words} {_on(wrong, case.mesh)} after the last step: it was not put back"
            )
            yield _found(case, name, "evaluation", separating_axis(wrong, case.mesh), text)


def _difference(
    whole: torch.Tensor, mine: Locals, wrong: Sequence[int], case: Comparison, packing: Packing | None
) -> tuple[str | None, str]:
    """The axis on which ranks' tensors go wrong, and how."""
    mesh, rank = case.mesh, wrong[0]
    local, axis = mine[rank], separating_axis(wrong, case.mesh)
    if local is None:
        return axis, "is missing"
    summed = partial_axis(whole, mine, mesh, 10 * case.bound)
    if summed:
        return (
            summed,
            f"differs from rank to rank of {summed}, and its sum is right: its reduction over {summed} is missing",
        )
    for other in range(mesh.world_size):
        for part in slices(whole, local.shape, mesh, other, packing):
            if other != rank and relative_error(local, part) <= case.bound:
                return _between(mesh, rank, other), f"is on rank {rank} the part that belongs to rank {other}"
    expected = next(slices(whole, local.shape, mesh, rank, packing), None)
    if expected is None:
        return (
            axis,
            f"has the shape {list(local.shape)} on rank {rank}, which is no part of {list(whole.shape)}",
        )
    parts = [
        next(slices(whole, t.shape, mesh, r, packing), None) if t is not None else None
        for r, t in enumerate(mine)
    ]
    factors = [ratio(t, p) for t, p in zip(mine, parts, strict=True)]
    known = [f for f in factors if f is not None]
    if len(known) == len(factors) and len({round(f, 9) for f in known}) > 1:
        listed = ", ".join(f"{f:.6g} times on rank {r}" for r, f in enumerate(known))
        return _varying_axis(
            known, mesh
        ), f"is the reference {listed}: what a token weighs depends on its rank, as in a mean of means"
    if factors[rank] is not None and axis is None:
        axis = data_first(
            axes_of(factors[rank] or 0.0, mesh) or axes_of(1 / (factors[rank] or 1.0), mesh), False
        )
    return axis, f"{describe(local, expected, mesh)}, {_on(wrong, mesh)}"


def _on(wrong: Sequence[int], mesh: Mesh) -> str:
    return (
        "on every rank"
        if len(wrong) == mesh.world_size
        else f"on rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
    )


def _varying_axis(values: Sequence[float], mesh: Mesh) -> str | None:
    """The axis along which a number per rank varies, if it is one only."""
    varying = [
        a
        for a in above_one(mesh)
        if any(
            not math.isclose(values[r], values[o], rel_tol=1e-9)
            for r in range(len(values))
            for o in line(mesh, r, a)
        )
    ]
    return varying[0] if len(varying) == 1 else None


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


def _between(mesh: Mesh, a: int, b: int) -> str | None:
    """The one axis on which two ranks differ."""
    here, there = mesh.coordinate(a), mesh.coordinate(b)
    axes = [axis for axis in here if here[axis] != there[axis]]
    return axes[0] if len(axes) == 1 else None


def _one_axis(case: Comparison, name: str) -> str | None:
    """The axis that a parameter's module is parallel on, where it is one only."""
    module = name.rpartition(".")[0]
    axes = {
        a for use in case.program if use.module == module and use.slot == "params" for a in use.axes
    } or set(above_one(case.mesh))
    return next(iter(axes)) if len(axes) == 1 else None


def _packing(program: Program, path: str) -> Packing | None:
    """How the last dimension of a module's output is packed: as its parameters' first is."""
    for use in program:
        if use.module == path and use.style == "colwise":
            return next(iter(use.packed.values()), None)
    return None


def _found(case: Comparison, name: str, phase: str, axis: str | None, text: str) -> Divergence:
    module = name.rpartition(".")[0]
    return Divergence(module, phase, axis, governing_rule(case.program, module, axis), text)


def governing_rule(program: Program, module: str, axis: str | None) -> Rule | None:
    """The rule that governs a module on an axis: its own, one that leaves it without a style, or that of the
    nearest module around it. For a data axis the fsdp rule that takes in the module, unless context
    parallelism is what the axis is for.
    """
    parts = set(axis.split(" x ")) if axis else set()
    data = bool(parts) and parts <= {"dp_replicate", "dp_shard"}
    at: str | None = module
    while at is not None:
        uses = [
            u
            for u in program
            if u.module == at and (u.slot == "fsdp") == data and (not parts or parts & set(u.axes))
        ]
        if uses:
            return uses[0].rule
        emptied = [r for r in program.plan.rules if r.empties and r.glob.select([at])]
        if emptied and at == module:
            return emptied[-1]
        at = at.rpartition(".")[0] if at else None
    return None
