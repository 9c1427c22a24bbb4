"""`validate` and `verify` from Python say what the commands say."""

from __future__ import annotations

import json
import pickle
from typing import Any

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


@pytest.mark.parametrize("given", [{}, {"workload": WORK}, {"loss": cross_entropy}])
def test_without_a_workload_or_a_loss_validate_says_which_checks_did_not_run(given: dict[str, Any]) -> None:
    found = pz.validate(llama()(), UNSUMMED, {"tp": 2}, **given)
    assert codes(found) == []
    lacking = " and ".join(f"`{name}`" for name in ("workload", "loss") if name not in given)
    assert f"`validate` needs {lacking} to check a step" in found.unchecked
    assert str(found).endswith(f"no mistake found, but {found.unchecked}")
    assert found.unchecked in repr(found)


def test_the_findings_of_validate_print_their_places_and_the_result() -> None:
    whole = pz.validate(llama()(), "llama", {"tp": 2}, workload=WORK, loss=cross_entropy)
    assert (whole.unchecked, str(whole).splitlines()[-1]) == ("", "valid")
    wrong = pz.validate(llama()(), UNSUMMED, {"tp": 2}, workload=WORK, loss=cross_entropy)
    assert "error[varying-gradient]" in str(wrong) and str(wrong).endswith("\n\nnot valid: 1 error")
    copied = pickle.loads(pickle.dumps(pz.validate(llama()(), "llama", {"tp": 2})))
    assert copied.unchecked and copied == ()


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
