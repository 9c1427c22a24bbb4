"""Every parameter lies under an imported plan on `ep` as transformers' own expert parallelism puts it, element by element."""

from __future__ import annotations

import pytest

from parallelizer.child.children import in_children
from tests.hugging_face.expert_survey import imported, imported_over_tp, survey, with_experts
from tests.hugging_face.families import families
from tests.hugging_face.placements import TP, theirs_of_experts
from tests.hugging_face.small import small

pytest.importorskip("transformers", reason="models of transformers are an optional extra")


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "jamba", "deepseek_v3"])
def test_parameters_lie_as_transformers_has_them(kind: str) -> None:
    model = small(kind)
    mine = imported(model)
    (others,) = in_children([(theirs_of_experts, model, TP - 1)])
    assert mine == others
    assert any(piece is not None for piece in mine.values())


def test_one_that_lies_otherwise_is_noticed() -> None:
    model = small("mixtral")
    (others,) = in_children([(theirs_of_experts, model, TP - 1)])
    assert {n for n, piece in imported(model, 0).items() if piece != others[n]} == {
        f"model.layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")
    }


def test_a_dense_mlp_that_an_ep_plan_splits_lies_over_tp() -> None:
    family = next(f for f in families("base_model_ep_plan") if f.config.__name__ == "Gemma4TextConfig")
    model = with_experts(family)
    mine = imported_over_tp(model)
    (others,) = in_children([(theirs_of_experts, model, TP - 1)])
    assert mine == {name: others[name] for name in mine}
    split = {part for name, piece in mine.items() if piece is not None for part in name.split(".")}
    assert {"mlp", "experts"} <= split


@pytest.mark.slow
def test_every_ep_plan_of_transformers_is_imported_and_lies_as_there() -> None:
    found = survey(list(families("base_model_ep_plan")), ranks=[1])
    assert len(found) >= 65
    assert {name: why for name, why in found.items() if why} == {}
