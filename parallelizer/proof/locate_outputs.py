"""Modules' outputs and the gradients of these, on every rank: what each holds must be a part of the whole that
its place allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from parallelizer.compiler.observe.running_module import within
from parallelizer.language.plan import DATA_AXES, TENSOR_AXES, Mesh
from parallelizer.proof.describe import axes_of, data_first, describe, ratio
from parallelizer.proof.divergence import Comparison, Divergence, at_step, between, found, on_ranks
from parallelizer.proof.rounding import norm_of, relative_error
from parallelizer.proof.slices import (
    Locals,
    above_one,
    alike_over,
    line,
    partial_axis,
    separating_axis,
    slices,
    summed_over,
    wrong_ranks,
)
from parallelizer.styles.application import Application, Program
from parallelizer.styles.packing import Packing


def outputs(case: Comparison, step: int, phase: str, when: str) -> Iterator[Divergence]:
    """Modules whose output differs, in order of execution. `when` stands in the text in the step's place. None where
    the batch was dealt out as only itself tells: which part of the whole a rank should hold is not known then.
    """
    if case.by_batch:
        return
    for path, whole in case.reference.outputs[step].items():
        if _in_experts(case.program, path):
            continue
        mine: Locals = [r.outputs[step].get(path) for r in case.ranks]
        for over in _summed_behind(case, path):
            mine = summed_over(mine, case.mesh, over)
        packing = _packing(case.program, path)
        wrong = wrong_ranks(whole, mine, case.mesh, case.bound, packing, order=case.order)
        if wrong and (axes := _summed_around(case, path, mine)):
            for over in axes:
                mine = summed_over(mine, case.mesh, over)
            wrong = wrong_ranks(whole, mine, case.mesh, 10 * case.bound, packing, order=case.order)
        if wrong:
            axis, words = _difference(whole, mine, wrong, case, packing)
            yield found(case, f"{path}.", phase, axis, f"the output of {path}{when or at_step(step)} {words}")


def output_gradients(case: Comparison, step: int, loss_is_right: bool) -> Iterator[Divergence]:
    """Modules the gradient of whose output differs, in order of the backward pass; none as in `outputs`."""
    if case.by_batch:
        return
    references = case.reference.output_gradients[step]
    largest = max((norm_of([g]) for g in references.values()), default=0.0)
    for position, (path, whole) in enumerate(references.items()):
        mine = [r.output_gradients[step].get(path) for r in case.ranks]
        if any(m is None for m in mine) or _in_experts(case.program, path):
            continue
        packing = _packing(case.program, path)
        # What cancels to zero is only rounding on both sides.
        least = largest if norm_of([whole]) <= case.bound * largest else 0.0
        wrong = wrong_ranks(whole, mine, case.mesh, case.bound, packing, least, case.order)
        # A gradient that is still to be summed over an axis is right for its place: over tp; and over the data, where the
        # output belongs to no row of the batch, as the embeddings of positions do.
        due = mine
        for over in _of_no_row(case, step, path):
            due = summed_over(due, case.mesh, over)
        if not wrong_ranks(whole, due, case.mesh, 10 * case.bound, packing, least, case.order):
            continue
        if not wrong or partial_axis(whole, due, case.mesh, 10 * case.bound, case.order) in TENSOR_AXES:
            continue
        axis, words = _difference(whole, mine, wrong, case, packing)
        cause = (
            ""
            if loss_is_right or position
            else "; the loss is wrong, and every output is right: look at the labels and at the loss"
        )
        yield found(
            case,
            f"{path}.",
            "backward",
            axis,
            f"the gradient of the output of {path}{at_step(step)} {words}{cause}",
        )


def _in_experts(program: Program, path: str) -> bool:
    """Whether a module lies inside of experts that are shared out: it has the rows that arrived, of tokens of all ranks."""
    return any(path.startswith(f"{a.module}.") for a in program.of_slot("experts"))


def _summed_behind(case: Comparison, path: str) -> list[str]:
    """The axes over which the module behind sums what experts return: each rank computed other tokens of the same stream."""
    terms = any(
        a.module == path and a.options.get("layout") == "terms" for a in case.program.of_slot("experts")
    )
    return [axis for axis in above_one(case.mesh) if terms and axis in TENSOR_AXES]


def _summed_around(case: Comparison, path: str, mine: Locals) -> list[str]:
    """The axes over which a module around this one sums its output: it takes what it makes as terms, as of experts that are split
    over tp. An output that is the same on all ranks of an axis is no term.
    """
    taken = [
        a.axis
        for a in case.program.of_slot("io")
        if path != a.module and within(path, a.module) and a.axis in TENSOR_AXES and _takes_terms(a)
    ]
    axes = [axis for axis in above_one(case.mesh) if axis in taken]
    return [axis for axis in axes if not alike_over(mine, case.mesh, axis, case.bound)]


def _takes_terms(application: Application) -> bool:
    flows = (application.options.get("output") or {}).values()
    return any(flow.arrives is not None and flow.arrives.kind == "partial" for flow in flows)


def _of_no_row(case: Comparison, step: int, path: str) -> list[str]:
    """The axes of the data over which a module's output is the same: every rank's gradient of it is a term of a sum."""
    mine = [r.outputs[step].get(path) for r in case.ranks]
    axes = [a for a in above_one(case.mesh) if a in DATA_AXES]
    return [a for a in axes if alike_over(mine, case.mesh, a, case.bound)]


def _difference(
    whole: torch.Tensor, mine: Locals, wrong: Sequence[int], case: Comparison, packing: Packing | None
) -> tuple[str | None, str]:
    """The axis on which ranks' tensors go wrong, and how."""
    mesh, rank = case.mesh, wrong[0]
    local, axis = mine[rank], separating_axis(wrong, case.mesh)
    if local is None:
        return axis, "is missing"
    summed = partial_axis(whole, mine, mesh, 10 * case.bound, case.order)
    if summed:
        return (
            summed,
            f"differs from rank to rank of {summed}, and its sum is right: its reduction over {summed} is missing",
        )
    for other in range(mesh.world_size):
        for part in slices(whole, local.shape, mesh, other, packing, case.order):
            if other != rank and relative_error(local, part) <= case.bound:
                return between(mesh, rank, other), f"is on rank {rank} the part that belongs to rank {other}"
    expected = next(slices(whole, local.shape, mesh, rank, packing, case.order), None)
    if expected is None:
        return (
            axis,
            f"has the shape {list(local.shape)} on rank {rank}, which is no part of {list(whole.shape)}",
        )
    parts = [
        next(slices(whole, t.shape, mesh, r, packing, case.order), None) if t is not None else None
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
    return axis, f"{describe(local, expected, mesh)}, {on_ranks(wrong, mesh)}"


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


def _packing(program: Program, path: str) -> Packing | None:
    """How the last dimension of a module's output is packed: as its parameters' first is."""
    for use in program:
        if use.module == path and use.style == "colwise":
            return next(iter(use.packed.values()), None)
    return None
