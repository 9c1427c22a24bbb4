"""Correct plans are proven, on any mesh and seed, and nothing is said to differ in them."""

from __future__ import annotations

import dataclasses
import io
import json
import statistics
from typing import Any

import pytest

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh
from parallelizer.proof import prove as module
from parallelizer.proof.compare import Difference, ProofVerdict
from parallelizer.proof.divergence import Divergence
from parallelizer.proof.locate import locate
from parallelizer.proof.proof import Proof
from parallelizer.proof.prove import prove, prove_subject
from parallelizer.proof.tiny import shrink
from parallelizer.report.documents import verify_document
from parallelizer.report.text.proof import text, write
from tests.chosen import a_fifth, chosen
from tests.proof import seeds, subjects

pytestmark = pytest.mark.ranks

MISSING_NORM = 'rules=["layers.*.ffn_norm: none"]'


PROVEN = [
    ("parallel=fsdp2_cp2_tp2",),
    ("parallel=hsdp2x2", "plan=llama_tp", 'rules=["layers.*: {style: fsdp, param_dtype: bfloat16}"]'),
    ("parallel=fsdp2_tp2", 'rules=["layers.*: checkpoint"]', "train.accumulate=2"),
    ("parallel=cp2_tp2", "++model.tie_embeddings=true", "++parallel.styles.fsdp.min_size=100"),
]


@pytest.mark.parametrize("overrides", chosen(PROVEN, PROVEN[:2]), ids=" ".join)
def test_a_correct_plan_is_proven_and_nothing_differs(
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    def judge(*args: Any) -> Any:
        verdict = module_judge(*args)
        found.append((args, verdict))
        return verdict

    module_judge = module.judge
    monkeypatch.setattr(module, "judge", judge)
    setup = subjects.setup(*overrides)
    assert prove(setup).passed
    ((reference, _, _, ranks, *_), verdict) = found[0]
    small, _ = shrink(setup)
    assert locate(small.compile(small.build_model()), reference, ranks, verdict) is None


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}])
def test_biases_and_packed_parts_are_proven(mesh: dict[str, int]) -> None:
    extra = '\n  "": fsdp\n' if "tp" not in mesh else ""
    assert prove_subject(subjects.mlp(mesh, subjects.MLP_PLAN.rstrip() + extra)).passed


def alarms(found: range) -> list[Any]:
    return [(seed, run, p.divergence) for seed, run, p in seeds.proofs(found) if not p.passed]


@pytest.mark.parametrize("seed", a_fifth(range(140, 143)))
def test_a_seed_raises_no_alarm(seed: int) -> None:
    assert not alarms(range(seed, seed + 1))


@pytest.mark.slow
def test_a_hundred_seeds_raise_no_alarm() -> None:
    assert not alarms(range(seeds.SEEDS))


@pytest.fixture(scope="module")
def failed() -> Proof:
    return prove(subjects.setup("parallel=tp2", MISSING_NORM), force=True)


def test_the_document_of_a_failed_proof_is_as_documented(failed: Proof) -> None:
    document = json.loads(json.dumps(verify_document(failed, failed.diagnostics), allow_nan=False))
    assert not document["passed"]
    assert document["ranks"] == 2 and document["mesh"] == failed.mesh.every
    assert document["dtype"] == "float64"
    assert set(document["loss"]) >= {"reference", "sharded", "relative_error"}
    errors = {p["name"]: p for p in document["parameters"]}
    assert errors["layers.1.ffn_norm.weight"]["gradient_error"] > 0.1
    assert errors["output.weight"]["update_error"] >= 0
    assert document["worst"]["name"].startswith("layers.")
    divergence = document["first_divergence"]
    assert (divergence["module"], divergence["phase"], divergence["axis"]) == (
        "layers.1.ffn_norm",
        "backward",
        "tp",
    )
    assert divergence["rule"]["key"] == "layers.*.ffn_norm"


def test_the_axis_that_is_to_blame_is_named_where_a_mesh_has_several() -> None:
    wrong = subjects.MLP_PLAN.replace("{style: colwise, packed: [1, 1]}", "colwise") + '  "": fsdp\n'
    subject = subjects.mlp({"dp_shard": 2, "tp": 2}, wrong)
    proof = prove_subject(subject)
    assert proof.broken_axes == ("tp",)
    assert proof.divergence is not None and proof.divergence.module == "down"
    assert "with tp alone, every other axis at 1: " in text(proof)
    assert verify_document(proof)["broken_axes"] == ["tp"]


@pytest.mark.parametrize("columns", [60, 100])
def test_the_report_fits_the_terminal(failed: Proof, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    write(dataclasses.replace(failed, changes=("dim 256 -> 64",) * 9), stream, seconds=1.0)
    lines = stream.getvalue().splitlines()
    assert columns - 20 < max(map(len, lines)) <= columns and lines[-1].startswith("NOT proven")


def test_the_loss_of_a_plan_without_its_norm_rule_is_right(failed: Proof) -> None:
    """Why losses are not enough."""
    assert failed.losses[0] == pytest.approx(failed.losses[1], rel=1e-14)


def test_bfloat16_is_information() -> None:
    """Even of a plan that is wrong: no bound, no verdict, no failure, and the largest errors first."""
    proof = prove(subjects.setup("parallel=tp2", MISSING_NORM), dtype="bfloat16", force=True)
    assert proof.passed and proof.proven is None and not proof.is_verdict
    assert 1e-4 < statistics.median(d.error for d in proof.verdict.of("gradient")) < 0.3
    document = json.loads(json.dumps(verify_document(proof), allow_nan=False))
    assert (document["passed"], document["proven"], document["verdict"]) == (True, None, False)
    assert document["rule"] is None and document["first_divergence"] is None
    assert document["worst"]["bound"] is None and document["worst"]["share"] is None
    assert document["worst"]["error"] >= max(p["gradient_error"] for p in document["parameters"])
    assert "information, not a verdict" in text(proof) and "bound" not in text(proof)


def test_bfloat16_says_when_nothing_computes_in_it() -> None:
    proof = prove_subject(subjects.mlp({"tp": 2}), dtype="bfloat16")
    assert proof.passed and text(proof).endswith("fsdp does, and the plan has no such style")


def test_a_verdict_is_proven_or_not(failed: Proof) -> None:
    assert failed.proven is False and verify_document(failed)["proven"] is False
    refused = verify_document(None)
    assert (refused["passed"], refused["proven"], refused["verdict"]) == (False, None, False)


def test_float32_is_a_verdict_of_its_own_precision() -> None:
    proof = prove(subjects.setup("parallel=tp2"), dtype="float32")
    assert proof.passed and proof.is_verdict
    assert max(d.error for d in proof.verdict.of("gradient")) > 1e-9
    assert not prove(subjects.setup("parallel=tp2", MISSING_NORM), dtype="float32", force=True).passed


def test_a_refused_plan_is_not_run() -> None:
    with pytest.raises(PlanError, match=r"layers\.\*\.nothing"):
        prove(subjects.setup("parallel=tp2", 'rules=["layers.*.nothing: colwise"]'))


def test_a_module_that_fails_on_a_rank_is_told_at_its_rule(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError) as caught:
        prove_subject(
            subjects.mlp({"tp": 2}, "version: 1\nrules:\n  down: {style: colwise, output: shard(-1)}\n")
        )
    (found,) = caught.value.diagnostics
    assert found.code == "rank-failed" and found.message.startswith("the forward of head fails on rank ")
    assert "RuntimeError: " in found.message and found.help and "no rule of the plan" in found.help
    with pytest.raises(PlanError) as caught:
        prove_subject(subjects.mlp({"tp": 2}, "version: 1\nrules:\n  down: rowwise\n"))
    (found,) = caught.value.diagnostics
    assert found.message.startswith("the forward of down fails on rank ")
    assert found.span is not None and found.span.line == 3
    assert capfd.readouterr().err == ""


def test_the_cost_does_not_depend_on_the_real_size() -> None:
    proof = prove(subjects.setup("model=llama3_405b", "parallel=fsdp2"))
    assert proof.passed
    assert any(change.startswith("n_layers 126 -> ") for change in proof.changes)


def test_a_proof_prints_as_a_table() -> None:
    differences = (
        Difference("gradient", "a.weight", 0, 1e-9, 1e-12),
        Difference("gradient", "b", 1, 0.0, 1e-12),
    )
    where = Divergence("a", "backward", "tp", None, "the gradient of a.weight is 1/tp of the reference")
    proof = Proof("llama", Mesh({"tp": 2}), "float64", ProofVerdict(differences, 16), (1.5, 1.25), where)
    assert str(proof).splitlines() == [
        "llama on tp=2, in float64: NOT proven",
        "  loss              1.5 unsharded, 1.25 sharded",
        "  a.weight          gradient of step 0: error 1e-09, bound 1e-12",
        "  b                 gradient of step 1: error 0, bound 1e-12",
        "  first difference  the gradient of a.weight is 1/tp of the reference",
    ]
