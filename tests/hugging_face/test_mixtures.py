"""A shipped mixture is proven on two and four ranks that share its experts out, under everything that a plan may add.

`python -m pytest -m "" tests/hugging_face/test_mixtures.py` runs all of it; the default run has one case.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.proof.prove import prove
from tests.proof import subjects

pytest.importorskip("transformers", reason="the optional extra `hf`")
pytestmark = pytest.mark.ranks

MESHES = {"ep2": ("parallel=fsdp2_ep2",), "ep4": ("parallel=fsdp4_ep4",)}
STAGES = {
    "ep2": ("parallel=pp2_fsdp2", "parallel.mesh.ep=2"),
    "ep4": ("parallel=pp2_fsdp2", "parallel.mesh.dp_shard=4", "parallel.mesh.ep=4"),
}

PACKED = """
version: 1
extends: hf_qwen3_moe
buffers:
  batch:
    document_ids: {dim: 1, documents: true}
    position_ids: 1
    attention_mask: document-mask
"""

WITH = {
    "checkpoint": ('rules=["model.layers.*: checkpoint"]',),
    "selective checkpoint": ('rules=["model.layers.*: {style: checkpoint, mode: selective}"]',),
    "compiled attention": ('rules=["model.layers.*.self_attn: {style: compile, backend: aot_eager}"]',),
    "packed documents": (
        "+model.batch.document_ids={shape: [batch, sequence], dtype: int64, range: [0, 4]}",
        "+model.batch.position_ids={shape: [batch, sequence], dtype: int64, range: [0, 256]}",
    ),
    "accumulation": ("train.accumulate=2",),
    "grouped_mm": ("+model.experts=grouped_mm",),
    "batched_mm": ("+model.experts=batched_mm",),
    "eager": ("+model.experts=eager",),
    "pp2": (),
}
"""What is added, by name."""


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", WITH)
@pytest.mark.slow
def test_it_is_proven(name: str, mesh: str, tmp_path: Path) -> None:
    overrides = [*WITH[name], *(STAGES if name == "pp2" else MESHES)[mesh]]
    if name == "packed documents":
        plan = tmp_path / "plan.yaml"
        plan.write_text(PACKED)
        overrides.append(f"plan={plan}")
    proof = prove(subjects.setup("model=hf_qwen3_moe", *overrides))
    assert proof.passed, proof.divergence
