"""Every planted fault is found, placed and named; a fifth of them in the default run."""

from __future__ import annotations

import pytest

from tests.chosen import first_of_each
from tests.proof.faults import FAULTS, Fault, found_rightly, proof_of


@pytest.mark.ranks
@pytest.mark.parametrize(
    "fault", first_of_each(FAULTS, lambda fault: (fault.phase, fault.axis)), ids=lambda fault: fault.name
)
def test_a_planted_fault_is_found_placed_and_named(fault: Fault) -> None:
    proof = proof_of(fault)
    assert found_rightly(fault, proof), proof.divergence
