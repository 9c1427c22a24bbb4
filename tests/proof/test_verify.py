"""`validate` and `verify` from Python say what the commands say."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.workload import Entry, Workload
from parallelizer.losses import cross_entropy
from parallelizer.simulate.meta_copy import meta_copy
from tests.parity import plan
from tests.recipes.runs import ROOT, typed
from tests.runtime.test_step import llama

WORK = Workload(
    {name: Entry(("batch", "sequence"), range=(0, 32)) for name in ("input_ids", "labels")}, 4, 16
)
UNSUMMED = plan('extends: llama\nrules: {"layers.*.ffn_norm": none}')


def codes(found: tuple[pz.Diagnostic, ...]) -> list[str]:
    return [d.code for d in found if d.severity == "error"]


@pytest.mark.parametrize("rule", [[], ["rules=['layers.*.ffn_norm: none']"], ["rules=['layer.*: fsdp']"]])
def test_validate_of_a_setup_is_the_command(rule: list[str], tmp_path: object) -> None:
    overrides = ["model=llama_debug", "parallel=cp2_tp2", *rule]
    ran = typed("validate", "--no-proof", *overrides, "--json", cwd=ROOT, module="parallelizer")
    told = [d["code"] for d in json.loads(ran.out)["diagnostics"]]
    found = pz.validate(pz.from_overrides(overrides), prove=False)
    assert [d.code for d in found] == told
    assert bool(codes(found)) == bool(rule) == bool(ran.status)


def test_a_model_that_is_there_is_validated_under_a_plan_and_left_as_it_is() -> None:
    model = llama()()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert codes(pz.validate(model, "llama", {"tp": 2})) == []
    assert codes(pz.validate(model, "llama", {"tp": 2}, workload=WORK, loss=cross_entropy)) == []
    assert codes(pz.validate(model, UNSUMMED, {"tp": 2})) == []  # what only a step tells
    followed = pz.validate(model, UNSUMMED, pz.Mesh({"tp": 2}), workload=WORK, loss=cross_entropy)
    assert codes(followed) == ["varying-gradient"]
    assert codes(pz.validate(model, "llama", {"tp": 7})) != []
    assert codes(pz.validate(model, "no_such_plan", {"tp": 2})) == ["plan-not-found"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="needs a plan and a mesh"):
        pz.validate(model)


def test_a_copy_without_memory_shares_what_the_model_shares() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("table", torch.ones(3))

    copied = meta_copy(Tied())
    assert all(t.is_meta for t in (*copied.parameters(), *copied.buffers()))
    assert copied.head.weight is copied.embed.weight and len(list(copied.parameters())) == 1


def test_what_is_written_wrongly_is_no_setup() -> None:
    with pytest.raises(PlanError, match="llama_debig"):
        pz.from_overrides(["model=llama_debig"])


@pytest.mark.ranks
def test_verify_is_the_command() -> None:
    setup = pz.from_overrides(["parallel=tp2"])
    for _ in range(2):  # the second time the package of that name has been imported
        proof = pz.verify(setup)
    assert proof.passed and proof.mesh == pz.Mesh({"tp": 2}) and proof.dtype == "float64"
