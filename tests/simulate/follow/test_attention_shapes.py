"""The shapes of attention calls on a rank are its heads and rows of the whole model's, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parallelizer.compiler.observe.attention_calls import CallShape
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.codes.all_codes import CODES
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.simulate.follow.attention_shapes import Rank
from tests.diagnostics.codes.run_example import found
from tests.simulate.setups import followed_findings

WHOLE = CallShape(batch=2, queries=8, keys=4, rows=32, key_rows=32, size=16, value_size=16)
TP2 = Rank({}, cp=1, splits=(1, 2), batch=2, inside=False)
TP8 = replace(TP2, splits=(1, 8))
CP2_TP2 = Rank({32: 16}, cp=2, splits=(1, 2), batch=2, inside=False)
PADDED = Rank({30: 16}, cp=2, splits=(1,), batch=2, inside=False)
LATENT = replace(WHOLE, size=24, keys=8)
ONE_KEY = replace(WHOLE, keys=1)


@pytest.mark.parametrize(
    ("rank", "whole", "changes"),
    [
        (TP2, WHOLE, {}),
        (TP2, WHOLE, {"queries": 4, "keys": 2}),
        (TP2, LATENT, {"queries": 4, "keys": 4}),
        (TP2, ONE_KEY, {"queries": 4}),
        (TP8, WHOLE, {"queries": 1, "keys": 1}),  # keys replicated to groups
        (TP2, replace(WHOLE, key_rows=7), {"queries": 4, "keys": 2}),  # cross attention
        (CP2_TP2, WHOLE, {"queries": 4, "keys": 2, "rows": 16, "key_rows": 16}),
        (CP2_TP2, replace(WHOLE, key_rows=10), {"rows": 16}),  # what is attended to is whole,
        (CP2_TP2, replace(WHOLE, key_rows=10), {"rows": 16, "key_rows": 5}),  # or split
        (PADDED, replace(WHOLE, rows=30, key_rows=30), {"rows": 16, "key_rows": 16}),
        (replace(CP2_TP2, inside=True), WHOLE, {"rows": 16, "key_rows": 16}),
        (replace(CP2_TP2, inside=True), WHOLE, {}),
    ],
)
def test_a_part_of_the_heads_and_rows_fits(rank: Rank, whole: CallShape, changes: dict[str, int]) -> None:
    assert rank.fits(replace(whole, **changes), whole)


@pytest.mark.parametrize(
    ("rank", "whole", "changes"),
    [
        (TP2, WHOLE, {"rows": 16, "key_rows": 16}),  # heads of the whole model, rows of fewer features
        (TP2, WHOLE, {"size": 8, "value_size": 8}),
        (TP2, WHOLE, {"value_size": 8}),
        (TP2, WHOLE, {"batch": 1}),
        (TP2, WHOLE, {"queries": 2, "keys": 1}),
        (TP2, WHOLE, {"queries": 4, "keys": 1}),
        (TP2, WHOLE, {"keys": 2}),
        (TP2, WHOLE, {"queries": 4}),  # keys that nobody split meet other queries than theirs
        (TP2, replace(WHOLE, queries=12, keys=6), {"queries": 6, "keys": 2}),
        (CP2_TP2, WHOLE, {"rows": 8, "key_rows": 8}),
        (CP2_TP2, WHOLE, {"queries": 4, "keys": 2}),
        (CP2_TP2, WHOLE, {"rows": 16}),
        (PADDED, replace(WHOLE, rows=30, key_rows=30), {"rows": 15, "key_rows": 15}),
        (replace(CP2_TP2, inside=True), WHOLE, {"rows": 8, "key_rows": 8}),
    ],
)
def test_anything_else_does_not(rank: Rank, whole: CallShape, changes: dict[str, int]) -> None:
    assert not rank.fits(replace(whole, **changes), whole)


def test_the_part_that_is_expected_fits_itself() -> None:
    for rank in (TP2, TP8, CP2_TP2):
        assert rank.fits(rank.part_of(WHOLE), WHOLE)
    assert CP2_TP2.part_of(WHOLE) == replace(WHOLE, queries=4, keys=2, rows=16, key_rows=16)


HEADS = CODES["attention-shape"].example
CONTEXT = "rules: {qkv.*: colwise, out: rowwise, '': [context-parallel, fsdp]}\nbuffers: {batch: {input_ids: 1, labels: 1}}"
SDPA = "scaled_dot_product_attention(q, k, v, is_causal=True)"
FLEX = "flex_attention(q, k, v)"


@pytest.mark.parametrize(
    ("preset", "call"),
    [
        pytest.param("tp2", SDPA, marks=pytest.mark.slow),  # the code's own example
        ("tp2", FLEX),
        ("cp2_tp2", SDPA),
        ("cp2_tp2", FLEX),
    ],
)
def test_both_kinds_of_attention_are_seen_with_and_without_context_parallelism(
    preset: str, call: str
) -> None:
    code = HEADS.files["heads.py"].replace(SDPA, call)
    code = code.replace(
        "from torch import nn",
        "from torch import nn\nfrom torch.nn.attention.flex_attention import flex_attention",
        1,
    )
    command = HEADS.command.replace("parallel=tp2", f"parallel={preset}")
    plan = HEADS.files["plan.yaml"] if preset == "tp2" else CONTEXT
    files = {**HEADS.files, "plan.yaml": plan, "heads.py": code}
    with found(replace(HEADS, command=command, files=files)) as all_of_it:
        [one] = [d for d in all_of_it if d.severity == "error"]
    assert one.code == "attention-shape" and one.span is not None
    rows = 32 if preset == "tp2" else 16
    assert f"{rows // 2} rows, and a rank should have 2 query heads of size 8 for {rows} rows" in one.message


def followed(plan: Path, preset: str) -> tuple[Diagnostic, ...]:
    """What the followed step of an OPT says."""
    overrides = [
        "model=hf_opt",
        f"parallel={preset}",
        f"plan={plan}",
        "train.seq_len=64",
        "train.batch_size=2",
    ]
    setup = from_config(*compose_config(overrides, None))
    model = setup.build_model()
    return followed_findings(setup, setup.compile(model), model)


@pytest.mark.parametrize(("preset", "rows", "part"), [("tp2", 64, 32), ("cp2_tp2", 32, 16)])
def test_heads_that_a_forward_reads_and_nobody_divides(
    preset: str, rows: int, part: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="the optional extra `hf`")
    text = Path(config_folder(), "plans", "hf_opt.yaml").read_text()
    lines = [line for line in text.splitlines() if "divide: [num_heads]" not in line]
    assert len(lines) == len(text.splitlines()) - 1
    plan = tmp_path / "opt.yaml"
    plan.write_text("\n".join(lines))
    [one] = followed(plan, preset)
    assert one.code == "attention-shape" and one.severity == "error"
    assert "attention in model.decoder.layers.{0,1}.self_attn is given 16 query heads" in one.message
    assert f"for {part} rows, and a rank should have 8 query heads of size 16 for {rows} rows" in one.message
    assert one.span is not None and "self_attn:" in lines[one.span.line - 1]
    assert "num_heads" in (one.help or "") and "head_dim" not in (one.help or "")
