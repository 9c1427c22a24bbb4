"""The verdict: which errors there are, and the bound that rounding explains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.plan import Mesh
from parallelizer.proof.dropout import NO_RANDOM_NUMBERS
from parallelizer.proof.observe import STEPS, Observation, SceneSeen
from parallelizer.proof.rounding import (
    AMPLIFIED,
    LIMIT,
    MARGIN,
    WIDEST,
    least_norm,
    norm_of,
    nudge_size,
    relative_error,
    terms_of,
)
from parallelizer.proof.slices import batch_index


@dataclass(frozen=True)
class Difference:
    """One compared quantity: its relative error (Frobenius, against the reference) and its bound."""

    what: str
    name: str
    step: int
    error: float
    bound: float

    @property
    def when(self) -> str:
        """`of step 1`; a step behind the others has other weights and inputs."""
        return f"of step {self.step}" if self.step < STEPS else "with other weights and inputs"

    @property
    def passed(self) -> bool:
        """An error that is not a number is no pass."""
        return self.error <= self.bound

    @property
    def share(self) -> float:
        """The error as a share of its bound: at most 1 for a pass."""
        return self.error / self.bound if math.isfinite(self.error) else math.inf


@dataclass(frozen=True)
class ProofVerdict:
    """Every comparison, the constant of the rule, and what replicas should hold alike and do not."""

    differences: tuple[Difference, ...]
    constant: float
    unequal: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.unequal and all(d.passed for d in self.differences)

    def of(self, what: str) -> list[Difference]:
        """The differences of one kind."""
        return [d for d in self.differences if d.what == what]

    def worst(self, count: int = 3) -> list[Difference]:
        """The differences nearest to their bounds, or furthest over them; each quantity once."""
        once: dict[tuple[str, str], Difference] = {}
        for difference in sorted(self.differences, key=lambda d: -d.share):
            once.setdefault((difference.what, difference.name), difference)
        return list(once.values())[:count]


class NotRepeatedError(PlanError):
    """The unsharded run gives other numbers in another order of summation."""


def judge(
    reference: Observation,
    other_order: Observation,
    nudged: Observation,
    ranks: Sequence[Observation],
    mesh: Mesh,
    tokens: int,
    dtype: torch.dtype,
    loud: float = 1.0,
) -> ProofVerdict:
    """Compare the ranks' run with the reference under the rule error <= c * eps * sqrt(n).

    n is the number of terms in the longest sum behind a quantity: the tokens of the global batch times the
    width it came through. c is the largest constant that the run in another order of summation needed up to
    the first update, at least 1, times `MARGIN`. Where that run needed more than `LIMIT`, no bound outside of
    the scenes is wider than `WIDEST`. Behind an update the bound is as much wider as the run with nudged
    gradients shows errors to grow there: an optimizer that divides by a gradient's size makes much of
    rounding where the gradient is small. It is wider by loud**4 too, where values are multiplied by `loud`
    behind the first update: attention multiplies two of them, an exponential makes much of their rounding.
    Initial values are no sums: they must be equal, and so must buffers of whole numbers. Others may be sums, as running
    means are. Whole parameters are rank 0's, and their bits are looked at on every rank.

    Raises NotRepeatedError when the run in another order of summation is no such thing: nothing is proven by bounds
    that everything keeps.
    """
    eps = torch.finfo(dtype).eps
    needed, *where = needed_constant(reference, other_order, tokens, dtype)
    _check_calibration(needed, *where)
    constant, widest = MARGIN * max(1.0, needed), WIDEST if needed > LIMIT else math.inf
    growth = {
        (what, name, step): max(1.0, e / nudge_size(dtype))
        if _after_update(what, step) and math.isfinite(e)
        else 1.0
        for what, name, step, e, _ in _sums([nudged], reference, None, tokens, dtype)
    }
    differences = [
        Difference(
            what,
            name,
            step,
            error,
            min(
                widest,
                constant
                * eps
                * math.sqrt(n)
                * growth.get((what, name, step), 1.0)
                * (loud**4 if _after_update(what, step) else 1.0),
            ),
        )
        for what, name, step, error, n in _sums(ranks, reference, mesh, tokens, dtype)
    ]
    differences += _scenes(reference, other_order, ranks, tokens, eps, constant)
    differences += [
        Difference("initial value", name, 0, relative_error(ranks[0].start.get(name), t), eps)
        for name, t in reference.start.items()
    ]
    differences += [
        Difference("buffer", name, 0, relative_error(seen.buffers.get(name), t), eps)
        for name, t in reference.buffers.items()
        if not t.is_floating_point()
        for seen in ranks
    ]
    return ProofVerdict(tuple(differences), constant, tuple(unequal(ranks)))


def needed_constant(
    reference: Observation, other_order: Observation, tokens: int, dtype: torch.dtype
) -> tuple[float, str, str]:
    """The largest constant that the run in another order of summation needs up to the first update, and of what."""
    eps = torch.finfo(dtype).eps
    return max(
        (e / (eps * math.sqrt(n)), what, name)
        for what, name, step, e, n in _sums([other_order], reference, None, tokens, dtype)
        if not _after_update(what, step)
    )


def _scenes(
    reference: Observation,
    other_order: Observation,
    ranks: Sequence[Observation],
    tokens: int,
    eps: float,
    constant: float,
) -> Iterator[Difference]:
    """The differences in each scene, which counts as a step behind the others. A scene that is not finite, or that does not
    repeat in another order of summation, says nothing.
    """
    for at, scene in enumerate(reference.scenes):
        played = [r.scenes[at] for r in ranks]
        calibrated = {
            (w, n): e / terms for w, n, e, terms in _of_scene([other_order.scenes[at]], scene, tokens, eps)
        }
        needed = max(calibrated.values(), default=math.inf)
        if not needed <= LIMIT:
            continue
        factor = max(constant, MARGIN * needed) * max(1.0, scene.scene.scale) ** 4
        for what, name, error, terms in _of_scene(played, scene, tokens, eps):
            yield Difference(what, name, STEPS + at, error, factor * terms)


def _of_scene(
    played: Sequence[SceneSeen], reference: SceneSeen, tokens: int, eps: float
) -> Iterator[tuple[str, str, float, float]]:
    """(what, name, error, eps * sqrt(n))"""
    yield "loss", "", max(_scalar_error(one.loss, reference.loss) for one in played), eps * math.sqrt(tokens)
    whole = norm_of(reference.gradients.values())
    for name, gradient in reference.gradients.items():
        terms = terms_of(gradient, tokens)
        least = MARGIN * eps * math.sqrt(terms)
        error = max(relative_error(one.gradients.get(name), gradient, whole, least) for one in played)
        yield "gradient", name, error, eps * math.sqrt(terms)


def _check_calibration(needed: float, what: str, name: str) -> None:
    """The unsharded run in another order of summation must be the same but for rounding."""
    if needed <= AMPLIFIED:
        return
    where = f"{what} of {name}" if name else what
    message = f"the unsharded run does not repeat: in another order of summation its {where} differs by "
    message += f"{needed:.1g} times what rounding explains" if math.isfinite(needed) else "what is no number"
    raise NotRepeatedError([Diagnostic("model-failed", message, None, NO_RANDOM_NUMBERS)])


def _after_update(what: str, step: int) -> bool:
    return step > 0 or what in ("parameter", "optimizer state", "logits", "buffer")


def unequal(ranks: Sequence[Observation], moment: int | None = None) -> dict[str, tuple[int, int]]:
    """Parts of parameters of which two ranks hold copies with other bits, with those ranks; `moment` 0 is the
    start.
    """
    found: dict[str, tuple[int, int]] = {}
    moments = range(STEPS + 1) if moment is None else [moment]
    for when in moments:
        first: dict[str, tuple[int, str]] = {}
        for rank, seen in enumerate(ranks):
            for key, bits in seen.bits[when].items():
                holder, theirs = first.setdefault(key, (rank, bits))
                if theirs != bits:
                    found.setdefault(key, (holder, rank))
    return found


def _sums(
    ranks: Sequence[Observation],
    reference: Observation,
    mesh: Mesh | None,
    tokens: int,
    dtype: torch.dtype,
) -> Iterator[tuple[str, str, int, float, int]]:
    """(what, name, step, error, n) of everything that a sum went into. Without a mesh the one run has the
    batch turned around.
    """
    run = ranks[0]

    def distance(value: torch.Tensor | None, theirs: torch.Tensor | None, whole: float) -> float:
        return relative_error(value, theirs, whole, least_norm(dtype, terms_of(theirs, tokens)))

    for step in range(STEPS):
        all_gradients = norm_of(reference.gradients[step].values())
        all_parameters = norm_of(reference.parameters[step].values())
        for what, of, theirs in (
            ("loss", [r.losses for r in ranks], reference.losses),
            ("gradient norm", [r.norms for r in ranks], reference.norms),
        ):
            yield what, "", step, max(_scalar_error(mine[step], theirs[step]) for mine in of), tokens
        for name, gradient in reference.gradients[step].items():
            n = terms_of(gradient, tokens)
            yield (
                "gradient",
                name,
                step,
                max(distance(r.gradients[step].get(name), gradient, all_gradients) for r in ranks),
                n,
            )
            yield (
                "parameter",
                name,
                step,
                distance(run.parameters[step].get(name), reference.parameters[step][name], all_parameters),
                n,
            )
    for key, state in reference.states.items():
        alike = norm_of(
            s for k, s in reference.states.items() if k.partition(":")[2] == key.partition(":")[2]
        )
        yield (
            "optimizer state",
            key,
            STEPS - 1,
            distance(run.states.get(key), state, alike),
            terms_of(state, tokens),
        )
    for name, buffer in reference.buffers.items():
        if buffer.is_floating_point():
            error = max(relative_error(r.buffers.get(name), buffer) for r in ranks)
            yield "buffer", name, STEPS - 1, error, terms_of(buffer, tokens)
    if reference.logits is not None:
        n = terms_of(reference.logits, tokens)
        for rank, seen in enumerate(ranks):
            if mesh is None:
                yield "logits", "", STEPS - 1, relative_error(seen.logits, reference.logits), n
                continue
            index, count = batch_index(mesh, rank)
            if reference.logits.ndim == 0 and (count > 1 or mesh.sizes["cp"] > 1):
                continue  # a number of the whole batch there, of this rank's rows and tokens here
            rows = (
                reference.logits.chunk(count)[index]
                if count > 1 and reference.logits.shape[0] % count == 0
                else reference.logits
            )
            yield "logits", "", STEPS - 1, relative_error(seen.logits, rows), n


def _scalar_error(value: float, reference: float) -> float:
    error = abs(value - reference)
    if not math.isfinite(error):
        return math.inf
    return error / abs(reference) if reference else (0.0 if error == 0 else math.inf)
