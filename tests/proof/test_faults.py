"""Every planted fault is found, placed and named; a fifth of them in the default run."""

from __future__ import annotations

import pytest

from tests.chosen import first_of_each
from tests.proof.faults import FAULTS, Fault, found_rightly, proof_of


def kind(fault: Fault) -> tuple[str | None, ...]:
    """Faults of one kind are told from each other by their modules only."""
    return ("float8",) if fault.needs_torchao else (fault.phase, fault.axis)


@pytest.mark.ranks
@pytest.mark.parametrize("fault", first_of_each(FAULTS, kind), ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_placed_and_named(fault: Fault) -> None:
    if fault.needs_torchao:
        pytest.importorskip("torchao", reason="float8 needs torchao")
    proof = proof_of(fault)
    assert found_rightly(fault, proof), proof.divergence
