"""Errors, and which of them rounding explains."""

from __future__ import annotations

import math

import pytest
import torch

from parallelizer.proof.rounding import least_norm, norm_of, relative_error, terms_of

ONES = torch.ones(4, dtype=torch.float64)


def test_relative_error_of_nothing_against_nothing_is_none() -> None:
    zero = torch.zeros(3)
    assert relative_error(None, None) == 0
    assert relative_error(zero, zero) == 0
    assert relative_error(zero + 1, zero) == math.inf
    assert relative_error(None, zero) == math.inf


def test_an_error_is_relative_to_the_reference() -> None:
    assert relative_error(ONES * 1.5, ONES) == pytest.approx(0.5)
    assert relative_error(ONES * 1.5, ONES, whole=100.0, least=0.001) == pytest.approx(0.5)


@pytest.mark.parametrize("reference", [ONES * 0, ONES * 1e-18])
def test_where_the_reference_is_only_rounding_it_is_relative_to_the_whole(reference: torch.Tensor) -> None:
    least = least_norm(torch.float64, 100)
    assert relative_error(reference + 1e-16, reference, 10.0, least) == pytest.approx(2e-17)
    assert relative_error(reference + 1.0, reference, 10.0, least) == pytest.approx(0.2)  # and no less wrong
    assert relative_error(reference * math.nan, reference, 10.0, least) == math.inf


def test_the_rounding_of_a_tiny_gradient_is_relative_to_the_whole_and_a_fault_of_it_is_not() -> None:
    least = least_norm(torch.float64, 1000)  # 1.1e-13
    tiny = (
        ONES * 1e-12
    )  # of a whole of 1: rounding of larger terms is a part of it, as behind a saturated softmax
    assert relative_error(tiny * 1.03, tiny, 1.0, least) == pytest.approx(6e-14)
    assert relative_error(tiny * 2, tiny, 1.0, least) == pytest.approx(1.0)
    small = ONES * 1e-8
    assert relative_error(small * (1 + 1e-6), small, 1.0, least) == pytest.approx(1e-6)


def test_an_infinity_that_both_have_is_no_difference() -> None:
    mask = torch.tensor([0.0, 3.0, -math.inf])
    assert relative_error(mask.clone(), mask) == 0
    assert relative_error(torch.tensor([0.0, 6.0, -math.inf]), mask) == pytest.approx(1.0)
    for other in (0.0, math.inf, math.nan):
        assert relative_error(torch.tensor([0.0, 3.0, other]), mask) == math.inf


def test_norms_and_terms() -> None:
    assert norm_of([ONES, None, ONES * 2]) == pytest.approx(math.sqrt(20))
    assert (terms_of(torch.ones(3, 5), 7), terms_of(torch.ones(()), 7), terms_of(None, 7)) == (35, 7, 7)
