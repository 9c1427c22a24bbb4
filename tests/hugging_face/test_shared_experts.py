"""Every parameter lies under an imported plan on `ep` as transformers' own expert parallelism puts it, element by element."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
from torch import nn

import parallelizer as pz
from parallelizer.child.children import in_children
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh
from parallelizer.propose.from_transformers.imported import parsed
from parallelizer.propose.from_transformers.proposal import propose
from parallelizer.propose.from_transformers.write_plan import write_plan
from tests.hugging_face.families import Family, families
from tests.hugging_face.placements import TP, Piece, ours, theirs_of_experts
from tests.hugging_face.small import small

pytest.importorskip("transformers", reason="models of transformers are an optional extra")

DENSE = ("DiffusionGemmaTextConfig", "Gemma4TextConfig")
"""Their `ep_plan` splits the dense MLP beside the experts over the same ranks too, which then need the same tokens. Here these
ranks have tokens of their own, and tp splits the MLP.
"""

REFUSED = {"MuseSparkTextConfig": "experts-module"}
"""A norm inside of the experts, which every rank would have to hold whole."""


def imported(model: nn.Module, rank: int = TP - 1) -> dict[str, Piece]:
    program = pz.compile(parsed(write_plan(propose(model), [])), model, Mesh({"dp_shard": TP}, ep=TP))
    return ours(program, model, rank, "ep")


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


def outcome(some: Sequence[Family], rank: int) -> list[tuple[str, str]]:
    """The configuration of each family, with what is not equal. Uses this process up."""
    warnings.filterwarnings("ignore")
    found = []
    for family in some:
        model = family.build()
        try:
            mine = imported(model, rank)
        except PlanError as error:
            found.append((family.config.__name__, error.diagnostics[0].code))
            continue
        other = theirs_of_experts(model, rank)
        wrong = [name for name in mine if mine[name] != other[name]]
        found.append((family.config.__name__, ", ".join(sorted({name.split(".")[-3] for name in wrong}))))
    return found


@pytest.mark.slow
def test_every_ep_plan_of_transformers_is_imported_and_lies_as_there() -> None:
    some = list(families("base_model_ep_plan"))
    rows = [row for at in range(0, len(some), 8) for row in in_children([(outcome, some[at : at + 8], 1)])[0]]
    assert len(rows) >= 65
    assert {name: why for name, why in rows if why} == {**dict.fromkeys(DENSE, "mlp"), **REFUSED}
