"""Globs that a person would write, and that match nothing else."""

from __future__ import annotations

import pytest

from parallelizer.language.glob import parse_glob
from parallelizer.propose.globs import globs_for

pytest.importorskip("transformers", reason="keys are made wildcards by transformers' own rule")

LAYERS = range(3)
EVERY = [
    "",
    "norm",
    "lm_head",
    *(
        f"layers.{i}.{name}"
        for i in LAYERS
        for name in ("attn.q_proj", "attn.k_proj", "attn.q_norm", "mlp.gate_proj", "mlp.up_proj")
    ),
]


@pytest.mark.parametrize(
    ("names", "globs"),
    [
        (["lm_head"], ["lm_head"]),
        ([f"layers.{i}.attn.q_proj" for i in LAYERS], ["layers.*.attn.q_proj"]),
        ([f"layers.{i}.attn.{n}_proj" for i in LAYERS for n in "qk"], ["layers.*.attn.{q,k}_proj"]),
        (
            [f"layers.{i}.attn.{n}" for i in LAYERS for n in ("q_proj", "q_norm")],
            ["layers.*.attn.{q_proj,q_norm}"],
        ),
        (["layers.1.mlp.up_proj", "layers.2.mlp.up_proj"], ["layers.{1,2}.mlp.up_proj"]),
        (["norm", "layers.0.mlp.up_proj"], ["norm", "layers.0.mlp.up_proj"]),
    ],
)
def test_exactly_the_names_are_matched(names: list[str], globs: list[str]) -> None:
    assert globs_for(names, EVERY) == globs
    matched = [path for glob in globs for path in parse_glob(glob).select(EVERY)]
    assert sorted(matched) == sorted(names)
