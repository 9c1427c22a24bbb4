"""A shared parameter must be placed alike under each of its names, and gathered by one unit."""

from __future__ import annotations

import pytest

from tests.findings import finding, findings, marked, mesh_of
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
    text = 'rules: {tok_embeddings: fsdp, output: fsdp, "": fsdp}'
    found = finding(text, TIED, mesh_of(dp_shard=2))
    assert (
        found.message
        == "output.weight is the same parameter as tok_embeddings.weight, but fsdp gathers it in two units"
    )
    assert (marked(text, found), [marked(text, r.span) for r in found.related]) == (
        "output",
        ["tok_embeddings"],
    )
    text = 'rules: {tok_embeddings: fsdp, "": fsdp}'
    assert marked(text, finding(text, TIED, mesh_of(dp_shard=2))) == '""'


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
