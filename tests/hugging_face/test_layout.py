"""Whether a transformers model is given all tokens, or a rank's."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.compiler.compile import compile as compile_plan
from parallelizer.language.load import load_plan
from parallelizer.language.plan import Mesh

pytest.importorskip("transformers", reason="models of transformers are an optional extra")

from parallelizer.hugging_face import layout
from tests.hugging_face.small import small

INSIDE = """
rules:
  model.layers.0: {style: prepare-input, axis: cp, input: {hidden_states: replicate -> shard(1)}}
  "": fsdp
"""


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (f"{INSIDE}buffers: {{batch: {{labels: 1}}}}", True),
        (INSIDE, True),
        (f"{INSIDE}buffers: {{batch: {{input_ids: 1, labels: 1}}}}", False),
        (
            "rules: {model.layers.*.self_attn: context-parallel, '': fsdp}\n"
            "buffers: {batch: {input_ids: 1, labels: 1, position_ids: positions}}",
            False,
        ),
    ],
)
def test_a_sequence_is_split_inside_the_model_if_its_tokens_are_whole(
    text: str, inside: bool, tmp_path: Path
) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    program = compile_plan(load_plan(tmp_path / "plan.yaml"), small("llama"), Mesh({"cp": 2}))
    assert layout.splits_inside(program) is inside
