"""Sums over the tokens of all ranks, and a balancing loss of the whole batch that is made of them, on every data axis."""

from __future__ import annotations

import pytest
import torch

import parallelizer as pz
from parallelizer.proof.prove import prove_subject
from parallelizer.runtime.sum_over_batch import summing_by
from tests.proof import subjects

ON_CP = 'rules: {"": fsdp}\nbuffers: {batch: {input_ids: 1, labels: 1}}'


def test_in_a_process_alone_it_is_the_tensor() -> None:
    tensor = torch.ones(3)
    assert pz.sum_over_batch(tensor) is tensor
    with summing_by(lambda t: 2 * t):
        assert pz.sum_over_batch(tensor).tolist() == [2, 2, 2]
    assert pz.sum_over_batch(tensor) is tensor


@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 2},
        pytest.param({"cp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_loss_of_the_whole_batch_is_exact(mesh: dict[str, int]) -> None:
    proof = prove_subject(subjects.balanced(mesh, ON_CP))
    assert proof.passed, proof.divergence
