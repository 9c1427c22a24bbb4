"""Every parameter lies under an imported plan as under transformers' own tensor parallelism, element by element."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import parallelizer as pz
from parallelizer.child.children import in_children
from parallelizer.language.plan import Mesh
from parallelizer.propose.from_transformers.imported import parsed
from parallelizer.propose.from_transformers.proposal import propose
from parallelizer.propose.from_transformers.write_plan import write_plan
from tests.hugging_face.families import families
from tests.hugging_face.placements import TP, Piece, ours, theirs
from tests.hugging_face.small import small
from tests.hugging_face.survey import survey

pytest.importorskip("transformers", reason="models of transformers are an optional extra")

KINDS = (
    "llama",
    "qwen3",
    "mixtral",
    "deepseek_v2",
    "phi3",
    "gemma3_text",
    "glm4",
    "granite_swa",
    "longcat_flash",
    "jamba",
)


def imported(model: nn.Module, text: str | None = None) -> dict[str, Piece]:
    """Where each parameter's part of the last rank lies under the imported plan, or under another text."""
    program = pz.compile(parsed(text or write_plan(propose(model), [])), model, Mesh({"tp": TP}))
    return ours(program, model, TP - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_lie_as_transformers_has_them(kind: str) -> None:
    model = small(kind)
    mine = imported(model)
    (others,) = in_children([(theirs, model, TP - 1)])
    assert mine == others
    assert any(piece is not None for piece in mine.values())


def test_one_that_lies_otherwise_is_noticed() -> None:
    model: Any = small("mixtral")
    text = write_plan(propose(model), [])
    mine = imported(model, text.replace(", packed: [1, 1]", ""))
    (others,) = in_children([(theirs, model, TP - 1)])
    assert sorted(n for n in mine if mine[n] != others[n]) == [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.gate_up_proj",
    ]


@pytest.mark.slow
def test_nearly_every_plan_of_transformers_is_imported_and_lies_as_there() -> None:
    rows = survey(list(families()))
    assert len(rows) >= 140
    assert [r.config for r in rows if not r.imported or not r.equal] == []
