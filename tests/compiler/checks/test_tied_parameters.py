"""A shared parameter must be placed alike under each of its names, and gathered by one unit."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from tests.findings import compiled, finding, findings, marked, mesh_of
from tests.runtime.test_step import llama

TIED = llama(tie_embeddings=True)


@pytest.mark.parametrize(
    ("rules", "mark"),
    [
        (
            "tok_embeddings: {style: colwise, output: replicate}, output: {style: colwise, output: replicate}",
            "output",
        ),
        ("tok_embeddings: rowwise", "tok_embeddings"),
        ("output: {style: colwise, output: replicate}", "output"),
        ("tok_embeddings: rowwise, output: {style: colwise, packed: [1, 1]}", "output"),
    ],
)
def test_different_placements_are_refused(rules: str, mark: str) -> None:
    text = f"rules: {{{rules}}}"
    found = finding(text, TIED, mesh_of(tp=2))
    assert found.code == "tied-parameters"
    assert (
        found.message
        == "output.weight is the same parameter as tok_embeddings.weight, but the plan places it differently"
    )
    assert marked(text, found) == mark


def test_different_units_are_refused() -> None:
    text = "rules: {tok_embeddings: fsdp, output: fsdp}"
    [found] = [f for f in findings(text, TIED, mesh_of(dp_shard=2)) if f.code == "tied-parameters"]
    assert (
        found.message
        == "output.weight is the same parameter as tok_embeddings.weight, but fsdp gathers it in two units"
    )
    assert (marked(text, found), [marked(text, r.span) for r in found.related]) == (
        "output",
        ["tok_embeddings"],
    )


@pytest.mark.parametrize(
    "rules", ["tok_embeddings: fsdp", "output: fsdp", "tok_embeddings: fsdp, output: fsdp"]
)
def test_a_unit_that_shares_all_its_parameters_is_left_to_the_unit_around_it(rules: str) -> None:
    text = f'rules: {{{rules}, "": fsdp}}'
    program = compiled(text, TIED, mesh_of(dp_shard=2))
    [unit] = program.of_slot("fsdp")
    assert unit.module == "" and "tok_embeddings.weight" in unit.params


def test_a_unit_that_has_other_parameters_too_is_refused() -> None:
    text = 'rules: {first: fsdp, "": fsdp}'
    found = finding(text, SharedLayer, mesh_of(dp_shard=2))
    assert found.code == "tied-parameters" and marked(text, found) == '""'


class SharedLayer(nn.Module):
    """Two blocks that share one of their two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        )
        self.second[1].weight = self.first[1].weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def test_the_same_placement_and_unit_are_fine() -> None:
    assert findings("extends: llama", TIED, mesh_of(dp_shard=2, tp=2)) == ()
    assert (
        findings(
            "rules: {tok_embeddings: rowwise, output: {style: colwise, output: replicate}}",
            TIED,
            mesh_of(tp=2),
        )
        == ()
    )
    assert (
        findings('rules: {tok_embeddings: fsdp, output: fsdp, "": fsdp}', llama(), mesh_of(dp_shard=2)) == ()
    )
    assert findings('rules: {tok_embeddings: fsdp, output: fsdp, "": fsdp}', TIED) == ()
