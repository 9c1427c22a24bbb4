"""The rule: what rounding explains passes, anything else does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh
from parallelizer.proof.compare import Difference, ProofVerdict, judge, unequal
from parallelizer.proof.observe import Observation
from parallelizer.proof.rounding import nudge_size

ONE = Mesh({"tp": 2})


def observation(change: Callable[[Observation], None] | None = None) -> Observation:
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    seen = Observation(
        start={"w": w.clone()},
        losses=[2.0, 1.5],
        norms=[1.0, 0.9],
        gradients=[{"w": w * 2, "frozen": None}, {"w": w * 3, "frozen": None}],
        parameters=[{"w": w + 1, "frozen": w.clone()}, {"w": w + 2, "frozen": w.clone()}],
        states={"w:m": w.clone()},
        buffers={"b": torch.ones(2)},
        logits=w.clone(),
        bits=[{"w": "0"}, {"w": "1"}, {"w": "2"}],
    )
    if change is not None:
        change(seen)
    return seen


def verdict(
    change: Callable[[Observation], None] | None = None, other: Callable[[Observation], None] | None = None
) -> ProofVerdict:
    ranks = [observation(change), observation()]
    return judge(observation(), observation(other), observation(), ranks, ONE, 48, torch.float64)


def test_a_buffer_may_be_a_sum_in_another_order() -> None:
    def rounded(seen: Observation) -> None:
        seen.buffers["b"] = torch.ones(2, dtype=torch.float64) + 2**-51

    assert verdict(rounded).passed


def scale(factor: float) -> Callable[[Observation], None]:
    return lambda seen: seen.gradients[0].update(w=seen.gradients[0]["w"] * factor)  # type: ignore


def test_what_is_equal_passes_and_a_frozen_parameter_has_no_gradient() -> None:
    assert verdict().passed


@pytest.mark.parametrize(
    "change",
    [
        scale(1 + 1e-10),
        scale(math.nan),
        scale(math.inf),
        scale(0),
        lambda s: s.gradients[1].pop("w"),
        lambda s: s.gradients[0].update(frozen=torch.ones(4, 4)),
        lambda s: s.gradients[0].update(w=torch.zeros(2, 2)),
        lambda s: s.losses.__setitem__(1, 1.5 + 1e-9),
        lambda s: s.losses.__setitem__(0, math.nan),
        lambda s: s.norms.__setitem__(0, 1.0 - 1e-9),
        lambda s: s.parameters[1]["w"].add_(1e-9),
        lambda s: s.states.clear(),
        lambda s: s.buffers["b"].add_(1e-6),
        lambda s: s.buffers.update(b=torch.zeros(2)),
        lambda s: s.start["w"].mul_(1 + 1e-12),
        lambda s: s.logits.add_(1e-9),  # type: ignore[union-attr]
        lambda s: s.bits[2].update(w="another"),
    ],
)
def test_whatever_is_wrong_fails(change: Callable[[Observation], None]) -> None:
    assert not verdict(change).passed


def test_rounding_passes() -> None:
    assert verdict(scale(1 + 1e-15)).passed


def test_the_constant_grows_with_what_another_order_of_summation_needs() -> None:
    assert not verdict(scale(1 + 1e-11)).passed
    assert verdict(scale(1 + 1e-11), other=scale(1 + 3e-12)).passed


def test_bounds_grow_behind_an_update_only_where_nudged_gradients_grow() -> None:
    def later(size: float) -> Callable[[Observation], None]:
        return lambda seen: seen.gradients[1].update(w=seen.gradients[1]["w"] * (1 + size))  # type: ignore

    ranks = [observation(later(1e-11))] * 2
    nudged = observation(later(1000 * nudge_size(torch.float64)))
    assert not judge(observation(), observation(), observation(), ranks, ONE, 48, torch.float64).passed
    assert judge(observation(), observation(), nudged, ranks, ONE, 48, torch.float64).passed
    ranks = [observation(scale(1 + 1e-11))] * 2
    assert not judge(observation(), observation(), nudged, ranks, ONE, 48, torch.float64).passed


def test_a_gradient_that_is_wrong_on_another_rank_only_fails() -> None:
    ranks = [observation(), observation(scale(2))]
    assert not judge(observation(), observation(), observation(), ranks, ONE, 48, torch.float64).passed


def test_replicas_with_other_bits_are_named_with_their_ranks() -> None:
    ranks = [observation(), observation(lambda s: s.bits[1].update(w="x"))]
    assert unequal(ranks) == {"w": (0, 1)}
    assert unequal(ranks, 0) == {}


@pytest.mark.parametrize("factor", [1 + 1e-8, math.nan])
def test_a_calibrating_run_that_is_another_computation_proves_nothing(factor: float) -> None:
    with pytest.raises(PlanError, match="the unsharded run does not repeat"):
        verdict(other=scale(factor))


def test_a_calibrating_run_is_refused_before_bounds_are_so_wide_that_a_wrong_update_passes() -> None:
    """Behind an update the bound is wider by what nudged gradients grow to, and by what values are multiplied by."""
    nudged = observation(lambda s: s.parameters[1]["w"].mul_(1 + 3000 * nudge_size(torch.float64)))
    wrong = [observation(lambda s: s.parameters[1]["w"].mul_(1 + 1e-3))] * 2

    def judged(other: Observation) -> ProofVerdict:
        return judge(observation(), other, nudged, wrong, ONE, 48, torch.float64, 4.0)

    assert not judged(observation(scale(1 + 2e-11))).passed
    assert not judged(observation(scale(1 + 1e-9))).passed  # no bound is wide from there on
    with pytest.raises(PlanError, match="the unsharded run does not repeat"):
        judged(observation(scale(1 + 1e-8)))


def test_a_calibrating_run_that_makes_much_of_rounding_serves_while_no_bound_is_wide() -> None:
    other = observation(scale(1 + 1e-10))  # 6e4 times what rounding explains
    assert judge(observation(), other, observation(), [observation()] * 2, ONE, 48, torch.float64).passed
    wrong = [observation(scale(1 + 1e-4))] * 2
    assert not judge(observation(), other, observation(), wrong, ONE, 48, torch.float64).passed


def test_worst_names_each_quantity_once_and_what_is_missing_first() -> None:
    found = ProofVerdict(
        (
            Difference("gradient", "a", 0, 1e-3, 1),
            Difference("gradient", "a", 1, 1e-2, 1),
            Difference("gradient", "b", 0, math.inf, 1),
        ),
        16,
    )
    assert [(d.name, d.step) for d in found.worst()] == [("b", 0), ("a", 1)]
