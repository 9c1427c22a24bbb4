"""Linears in float8 are proven in float64, and what computes others, or with other scales, is found."""

from __future__ import annotations

import pytest

from parallelizer.proof.proof import Proof
from parallelizer.proof.prove import prove
from parallelizer.report.documents import verify_document
from parallelizer.report.text.proof import text
from parallelizer.styles.float8.recipes import TORCHAO_NAMES
from tests.chosen import chosen
from tests.proof import subjects
from tests.simulate.setups import CAST

pytest.importorskip("torchao", reason="float8 needs torchao")

GLOB = "layers.*.{attention.w[qkvo],feed_forward.w[123]}"


def proof_of(recipe: str, *overrides: str, dtype: str = "float64") -> Proof:
    rule = f"rules=['{GLOB}: {{style: float8, recipe: {recipe}}}']"
    return prove(subjects.setup(*overrides, rule), dtype=dtype)


PROVEN = [
    (recipe, preset)
    for recipe in TORCHAO_NAMES
    for preset in ("fsdp2", "fsdp2_tp2", "cp2_tp2", "pp2", "hsdp2x2")
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", chosen(PROVEN, [("tensorwise", "fsdp2")]), ids=" ".join)
def test_sharded_float8_equals_unsharded_float8(case: tuple[str, str]) -> None:
    recipe, preset = case
    proof = proof_of(recipe, f"parallel={preset}", "plan=llama")
    assert proof.passed and proof.proven, text(proof)
    assert len(proof.float8) == 14 and {one.recipe for one in proof.float8} == {recipe}
    assert all(0.005 < (one.output or 0) < 0.3 and 0.005 < (one.gradient or 0) < 0.5 for one in proof.float8)
    assert "float8, in both runs: 14 linears; from full precision differ outputs by" in text(proof)
    assert verify_document(proof)["float8"][0]["module"] == "layers.0.attention.wq"


GATHERED = "layers.*: {style: fsdp, gather: float8}"
MESHES: dict[str, tuple[str, ...]] = {
    "fsdp2": ("parallel=fsdp2",),
    "fsdp2_tp2": ("parallel=fsdp2_tp2",),
    "hsdp2x2": ("parallel=hsdp2x2",),
    "fsdp3": ("parallel.mesh.dp_shard=3", "train.batch_size=6"),
    "fsdp2 cp2": ("parallel.mesh.dp_shard=2", "parallel.mesh.cp=2"),
    "pp2 fsdp2": ("parallel=pp2", "parallel.mesh.dp_shard=2"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", chosen(MESHES, ["fsdp2"]))
def test_weights_that_are_gathered_in_float8_are_those_that_a_linear_would_cast(mesh: str) -> None:
    proof = gathered(*MESHES[mesh])
    assert proof.passed and proof.proven, text(proof)


def gathered(*overrides: str) -> Proof:
    rules = f"rules=['{GLOB}: float8', '{GATHERED}']"
    return prove(subjects.setup(*overrides, "plan=llama", rules))


@pytest.mark.ranks
@pytest.mark.slow
def test_gathers_of_float8_are_proven_inside_of_checkpoints_and_compiled_code() -> None:
    more = "layers.*: [checkpoint, {style: compile, backend: aot_eager}]"
    rules = f"rules=['{GLOB}: float8', '{GATHERED}', '{more}']"
    assert prove(subjects.setup("parallel=fsdp2", rules)).passed


CASTING: dict[str, tuple[str, ...]] = {
    "tp2": ("parallel=tp2",),
    "fsdp2_tp2": ("parallel=fsdp2_tp2",),
    "cp2_tp2": ("parallel=cp2_tp2",),
    "pp2_tp2": ("parallel=pp2_tp2",),
    "tp2 checkpoint": ("parallel=tp2", "layers.*: checkpoint"),
    "tp2 compile": ("parallel=tp2", "layers.*: {style: compile, backend: aot_eager}"),
    "fsdp2_tp2 gathered": ("parallel=fsdp2_tp2", GATHERED),
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", chosen(CASTING, ["tp2"]))
def test_inputs_that_are_gathered_in_float8_are_those_that_a_linear_would_cast(case: str) -> None:
    proof = cast(*CASTING[case])
    assert proof.passed and proof.proven, text(proof)


def cast(preset: str, *more: str) -> Proof:
    rules = ",".join(map(repr, (f"{GLOB}: float8", CAST, *more)))
    return prove(subjects.setup(preset, "plan=llama", f"rules=[{rules}]"))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("preset", ["cp2", "pp2_cp2"])
def test_packed_documents_share_scales_as_their_batch_deals_them_out(preset: str) -> None:
    packed = ("model=llama_packed", "plan=llama_packed", f"parallel={preset}")
    assert proof_of("tensorwise", *packed).passed


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("more", ["checkpoint", "{style: compile, backend: aot_eager}"])
def test_it_is_proven_inside_of_checkpoints_and_compiled_code(more: str) -> None:
    rules = f"rules=['{GLOB}: {{style: float8, recipe: rowwise}}', 'layers.*: {more}']"
    assert prove(subjects.setup("parallel=fsdp2_tp2", rules)).passed


@pytest.mark.ranks
@pytest.mark.slow
def test_in_float32_nothing_is_claimed() -> None:
    proof = proof_of("rowwise", "parallel=tp2", dtype="float32")
    assert proof.proven is None and proof.passed
    assert text(proof).endswith("information, not a verdict: float8 is proven in float64 alone")
