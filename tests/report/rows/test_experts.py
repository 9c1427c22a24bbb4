"""Which rank holds which experts, and what their tokens cost, against closed forms."""

from __future__ import annotations

import io

import pytest

from parallelizer.report.rows.experts import Sharing, sharing
from parallelizer.report.text.experts import write
from tests.simulate.setups import setup_of, traced

pytest.importorskip("transformers", reason="the optional extra `hf`")

WIDTH, LENGTH, BATCH, CHOSEN, EXPERTS, LAYERS = 64, 16, 8, 2, 8, 2
SMALL = (
    "model=hf_qwen3_moe", f"model.config.hidden_size={WIDTH}", "model.config.head_dim=16",
    "model.config.num_attention_heads=4", "model.config.num_key_value_heads=2", "model.config.moe_intermediate_size=32",
    f"train.seq_len={LENGTH}", f"train.batch_size={BATCH}",
)  # fmt: skip


def found(*overrides: str, rank: int = 0, compared: bool = True) -> Sharing:
    setup = setup_of(*SMALL, *overrides)
    model = setup.build_model()
    step, recipe = (traced(setup), setup.recipe()) if compared else (None, None)
    made = sharing(setup.compile(model), model, step, recipe, rank)
    assert made is not None
    return made


def shown(made: Sharing, per_node: int | None = None) -> str:
    stream = io.StringIO()
    write(made, stream, per_node, width=200)
    return stream.getvalue()


def test_every_rank_of_a_group_has_a_part_of_the_experts() -> None:
    made = found("parallel.mesh.dp_shard=4", "parallel.mesh.ep=2", compared=False, rank=3)
    assert (made.modules, made.group, made.shards) == (
        (("model.layers.{0,1}.mlp.experts", EXPERTS),),
        (2, 3),
        2,
    )
    assert made.held == (((0, 3), (4, 7)),)
    assert "rank 2: 0 to 3, rank 3: 4 to 7" in shown(made)
    assert "one node" in shown(made, 4) and "2 nodes" in shown(made, 3) and "node" not in shown(made)


def test_bytes_and_peaks_are_those_of_the_routing() -> None:
    made = found("parallel=fsdp2_ep2")
    rows = BATCH // 2 * LENGTH * CHOSEN
    # Half of the rows leave, of tokens and of results, and their weights; and the counts of the other rank's experts.
    forward = LAYERS * (2 * rows // 2 * WIDTH * 4 + rows // 2 * 4 + EXPERTS // 2 * 8)
    backward = LAYERS * (2 * rows // 2 * WIDTH * 4 + rows // 2 * 4)
    assert dict(made.sent) == {"forward": forward, "backward": backward}
    peaks = dict(made.peaks)
    assert list(peaks) == ["balanced", "worst"] and peaks["worst"] > peaks["balanced"]
    assert "if all tokens go to one rank" in shown(made)


@pytest.mark.slow
def test_peaks_are_the_same_whichever_routing_is_the_plans() -> None:
    balanced, worst = (found("parallel=fsdp2_ep2", f"++parallel.routing={r}") for r in ("balanced", "worst"))
    assert dict(balanced.peaks) == dict(worst.peaks) and worst.routing == "worst"


def test_a_plan_that_shares_no_experts_has_none() -> None:
    setup = setup_of(*SMALL, "parallel=fsdp2")
    model = setup.build_model()
    assert sharing(setup.compile(model), model, None) is None
