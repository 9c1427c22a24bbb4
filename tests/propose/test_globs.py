"""Globs that a person would write, and that match nothing else."""

from __future__ import annotations

import pytest

from parallelizer.language.glob import parse_glob
from parallelizer.propose.globs import ends_in_common, globs_for

LAYERS = range(3)
EVERY = [
    "",
    "norm",
    "lm_head",
    *(
        f"layers.{i}.{name}"
        for i in LAYERS
        for name in (
            "attn.q_proj",
            "attn.k_proj",
            "attn.q_norm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "ff.0",
            "ff.1",
        )
    ),
]


@pytest.mark.parametrize(
    ("names", "globs"),
    [
        ([""], [""]),
        (["lm_head"], ["lm_head"]),
        ([f"layers.{i}.attn.q_proj" for i in LAYERS], ["layers.*.attn.q_proj"]),
        ([f"layers.{i}.attn.{n}_proj" for i in LAYERS for n in "qk"], ["layers.*.attn.{q_proj,k_proj}"]),
        ([f"layers.{i}.ff.0" for i in LAYERS], ["layers.*.ff.0"]),
        ([f"layers.{i}.ff.{n}" for i in LAYERS for n in range(2)], ["layers.*.ff.*"]),
        (["layers.1.mlp.up_proj", "layers.2.mlp.up_proj"], ["layers.{1,2}.mlp.up_proj"]),
        (
            [*(f"layers.{i}.attn.q_proj" for i in LAYERS), "layers.0.mlp.up_proj", "layers.1.mlp.up_proj"],
            ["layers.*.attn.q_proj", "layers.{0,1}.mlp.up_proj"],
        ),
        (["norm", "layers.0.mlp.up_proj"], ["norm", "layers.0.mlp.up_proj"]),
    ],
)
def test_exactly_the_names_are_matched(names: list[str], globs: list[str]) -> None:
    assert globs_for(names, EVERY) == globs
    matched = [path for glob in globs for path in parse_glob(glob).select(EVERY)]
    assert sorted(matched) == sorted(names)


@pytest.mark.parametrize(
    ("glob", "shorter"),
    [
        ("layers.*.attn.{q_proj,k_proj}", "layers.*.attn.{q,k}_proj"),
        ("layers.*.attn.{q_proj,q_norm}", "layers.*.attn.{q_proj,q_norm}"),
        ("layers.{1,2}.mlp", "layers.{1,2}.mlp"),
        ("{a_b_c,d_b_c}", "{a,d}_b_c"),
    ],
)
def test_what_names_end_in_is_written_once(glob: str, shorter: str) -> None:
    assert ends_in_common(glob) == shorter
    assert parse_glob(glob).select(EVERY) == parse_glob(shorter).select(EVERY)
