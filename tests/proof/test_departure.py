"""The line on which ranks first compute what the unsharded run does not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import Mesh
from parallelizer.proof import departure as departing
from parallelizer.proof.departure import Visits, first_departure
from parallelizer.proof.not_equal import DEPARTS, not_equal
from parallelizer.proof.prove import prove_subject
from tests.proof import subjects
from tests.proof.test_mixed_rows import Rows, line_of

TP2 = Mesh({"tp": 2})
HERE, NEXT = Span("model.py", 1), Span("model.py", 2)


def visits(*lines: tuple[Span, Tensor]) -> Visits:
    return [(span, [tensor.double().flatten()]) for span, tensor in lines]


@given(st.data())
def test_however_a_result_is_split_its_parts_are_parts(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3).map(lambda n: 2 * n), min_size=1, max_size=3))
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    dim = data.draw(st.integers(0, len(shape) - 1))
    parts = whole.transpose(0, dim).chunk(2)
    assert first_departure(visits((HERE, whole)), [visits((HERE, part)) for part in parts], TP2) is None


def test_terms_of_a_sum_are_a_part_and_terms_of_another_sum_are_not() -> None:
    whole, term = torch.randn(2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    right = [visits((HERE, term)), visits((HERE, whole - term))]
    assert first_departure(visits((HERE, whole)), right, TP2) is None
    wrong = [visits((HERE, term)), visits((HERE, whole))]
    assert first_departure(visits((HERE, whole)), wrong, TP2) == HERE


def test_zeros_of_padding_and_what_is_masked_say_nothing() -> None:
    whole = torch.tensor([1.0, 2.0, 3.0, float("-inf")])
    ranks = [torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, float("-inf"), 0.0])]
    assert first_departure(visits((HERE, whole)), [visits((HERE, part)) for part in ranks], TP2) is None


def test_what_hooks_run_on_a_line_before_its_module_is_passed_over() -> None:
    gathered, inside, whole = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    alone = visits((NEXT, inside), (HERE, whole))
    on_ranks = visits((HERE, gathered), (NEXT, inside), (HERE, whole))
    assert first_departure(alone, [on_ranks, on_ranks], TP2) is None
    other = visits((HERE, gathered), (NEXT, inside), (HERE, whole + 1))
    assert first_departure(alone, [on_ranks, other], TP2) == HERE


PLAN = """
version: 1
rules:
  gate_up: {style: colwise, packed: [32, 32]}
  down: rowwise
"""


def limited(x: Tensor) -> Tensor:
    x = torch.tanh(x)
    return x / x.abs().amax(-1, keepdim=True)  # here


def shared_out(x: Tensor) -> Tensor:
    share = x.softmax(-1)  # here
    return share * x


def by_feature(x: Tensor) -> Tensor:
    return torch.tanh(x)


def failed(mix: Callable[[Tensor], Tensor], **more: Any) -> Any:
    subject = subjects.mlp({"tp": 2})
    plan = subjects.plan(PLAN)
    return prove_subject(dataclasses.replace(subject, plan=plan, build=lambda: Rows(mix), **more), force=True)


@pytest.mark.ranks
@pytest.mark.parametrize("mix", [limited, shared_out])
def test_a_proof_that_fails_names_the_line_that_takes_a_part_for_the_whole(
    mix: Callable[[Tensor], Tensor],
) -> None:
    proof = failed(mix)
    assert not proof.passed and proof.divergence.phase == "forward"
    assert (Path(proof.departure.file).name, proof.departure.line) == (Path(__file__).name, line_of(mix))
    source = Path(__file__).read_text().splitlines()[proof.departure.line - 1]
    assert source[proof.departure.column - 1 : proof.departure.end_column - 1] == source.strip()
    assert [(one.span, one.label) for one in not_equal(proof).related] == [(proof.departure, DEPARTS)]


@pytest.mark.ranks
def test_a_proof_that_passes_names_none() -> None:
    proof = failed(by_feature)
    assert proof.passed and proof.departure is None


def started(calls: Any) -> Any:
    raise RuntimeError("a run is started")


@pytest.mark.parametrize("slot", ["compile", "precision"])
def test_none_is_looked_for_where_results_are_not_comparable_by_line(
    slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code does not run line by line, and float8 rounds every result: no run is started."""
    monkeypatch.setattr(departing, "in_children", started)
    program: Any = SimpleNamespace(of_slot=lambda name: [name] if name == slot else [])
    assert departing.departure(subjects.mlp({"tp": 2}), program) is None
    other: Any = SimpleNamespace(of_slot=lambda _: [])
    with pytest.raises(RuntimeError, match="a run is started"):
        departing.departure(subjects.mlp({"tp": 2}), other)
