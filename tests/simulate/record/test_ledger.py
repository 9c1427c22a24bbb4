"""What the ledger says of each collective: its cause, and whether something runs beside it; and real ranks say the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.ledger_truth import predicted_ledgers
from parallelizer.configuration.setup import Setup
from parallelizer.runtime.redistribution import wire_bytes
from parallelizer.simulate.record.ledger import Collective
from parallelizer.styles.context_parallel.choice import Heads, sent
from tests.chosen import chosen
from tests.simulate.real_ledger import real_ledgers
from tests.simulate.setups import (
    CHECKPOINT,
    FLOAT8_RECIPES,
    GATHERED,
    GPT,
    SELECTIVE,
    in_float8,
    llama,
    setup_of,
    stack,
    traced,
)

PLAN = Path(__file__).parents[3] / "configs" / "plans" / "llama.yaml"
Told = tuple[str, str, str, str, str | None, bool]
"""Phase, axis, kind, module, the rule's key, and whether it is overlapped."""


def told(entries: tuple[Collective, ...]) -> list[Told]:
    return [(e.phase, e.axis, e.kind, e.module, e.rule and e.rule[0], e.overlapped) for e in entries]


OUT, ROOT = "layers.*.{attention.wo,feed_forward.w2}", ""


def forward(layer: int) -> Iterator[tuple[str, str, str]]:
    """Kind, module and rule of what one layer sends over tp."""
    yield "all_gather", f"layers.{layer}.attention", "layers.*.attention"
    yield "reduce_scatter", f"layers.{layer}.attention.wo", OUT
    yield "all_gather", f"layers.{layer}.feed_forward", "layers.*.feed_forward"
    yield "reduce_scatter", f"layers.{layer}.feed_forward.w2", OUT


def backward(layer: int) -> Iterator[tuple[str, str, str]]:
    """The same in the other direction."""
    opposite = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
    for kind, module, rule in reversed(list(forward(layer))):
        yield opposite[kind], module, rule


def whole_step(layers: int, checkpoint: bool) -> Iterator[Told]:
    """A step under FSDP and tensor parallelism with sequence parallelism, as one writes it down from the plan."""
    yield "forward", "dp_shard", "all_gather", "", ROOT, False
    yield "forward", "dp_shard", "all_gather", "tok_embeddings", "tok_embeddings", False
    yield "forward", "tp", "reduce_scatter", "tok_embeddings", "tok_embeddings", False
    for layer in range(layers):
        yield "forward", "dp_shard", "all_gather", f"layers.{layer}", "layers.*", False
        for kind, module, rule in forward(layer):
            yield "forward", "tp", kind, module, rule, False
    yield "forward", "dp_shard", "all_gather", "output", "output", False
    yield "forward", "tp", "all_gather", "output", "output", False
    for _ in ("the maxima", "the terms"):
        yield "loss", "tp", "all_reduce", "", None, False
    # FSDP gathers the layer that comes next before the one that runs: `output` runs beside the first.
    yield "backward", "dp_shard", "all_gather", f"layers.{layers - 1}", "layers.*", True
    yield "backward", "tp", "reduce_scatter", "output", "output", False
    yield "backward", "dp_shard", "reduce_scatter", "output", "output", True
    for layer in reversed(range(layers)):
        before, rule = (f"layers.{layer - 1}", "layers.*") if layer else ("tok_embeddings", "tok_embeddings")
        yield "backward", "dp_shard", "all_gather", before, rule, True
        first, *rest = backward(layer)
        yield "backward", "tp", *first, False
        if checkpoint:  # the forward again, but for the sum at its end
            for kind, module, rule in itertools.islice(forward(layer), 3):
                yield "backward", "tp", kind, module, rule, False
        for kind, module, rule in rest:
            yield "backward", "tp", kind, module, rule, False
        # The embedding runs beside the last of these.
        yield "backward", "dp_shard", "reduce_scatter", f"layers.{layer}", "layers.*", True
    yield "backward", "tp", "all_gather", "tok_embeddings", "tok_embeddings", False
    for module in (ROOT, "tok_embeddings"):  # nothing is left to run
        yield "backward", "dp_shard", "reduce_scatter", module, module, False
    yield "loss", "dp_shard", "all_reduce", "", None, False
    # The gradients of all norms together, then the two sums of the gradient norm.
    for axis in ("tp", "dp_shard", "tp"):
        yield "clip", axis, "all_reduce", "", None, False


@pytest.mark.parametrize("checkpoint", [False, True])
def test_each_entry_has_its_module_and_its_rule_in_order(checkpoint: bool) -> None:
    rules = [CHECKPOINT.format("layers")] if checkpoint else []
    entries = traced(llama("parallel=fsdp2_tp2", *rules)).ledger
    assert told(entries) == list(whole_step(2, checkpoint))
    lines = PLAN.read_text().splitlines()
    for rule in {e.rule for e in entries if e.rule is not None}:
        key, file, line = rule
        assert Path(file).resolve() == PLAN
        assert lines[line - 1].strip().removeprefix('"').startswith(key)


def test_embedding_and_head_of_a_model_of_transformers_are_gathered_apart_from_its_root() -> None:
    small = ("hidden_size=32", "intermediate_size=64", "num_attention_heads=4", "num_key_value_heads=2")
    words = (f"model.config.{word}" for word in (*small, "vocab_size=64", "num_hidden_layers=1"))
    entries = traced(setup_of("model=hf_llama", "parallel=fsdp2", "train.seq_len=8", *words)).ledger
    gathered = [
        (e.module, e.payload_bytes) for e in entries if (e.phase, e.kind) == ("forward", "all_gather")
    ]
    layer = 4 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64 + 2 * 32)
    table = 4 * 64 * 32
    assert gathered == [
        ("", 4 * 32),  # the last norm
        ("model.embed_tokens", table),
        ("model.layers.0", layer),
        ("lm_head", table),
    ]


def test_a_replica_sums_what_it_has_scattered_for_the_same_unit() -> None:
    entries = traced(stack("parallel=hsdp2x2", "model.depths=[2]")).ledger
    behind = [
        (a, b) for a, b in itertools.pairwise(entries) if b.axis == "dp_replicate" and b.phase == "backward"
    ]
    assert [b.module for _, b in behind] == ["stacks.0.1", "stacks.0.0", ""]
    for scattered, summed in behind:
        assert (scattered.kind, summed.kind) == ("reduce_scatter", "all_reduce")
        assert (scattered.module, scattered.rule, scattered.overlapped) == (
            summed.module,
            summed.rule,
            summed.overlapped,
        )
        assert scattered.payload_bytes == 2 * summed.payload_bytes


def test_a_parameter_that_stays_whole_is_summed_for_its_owner() -> None:
    entries = traced(stack("parallel=fsdp2", "model.depths=[1]", "++parallel.styles.fsdp.min_size=40")).ledger
    sums = [e for e in entries if e.kind == "all_reduce" and e.phase == "backward"]
    assert [(e.module, e.payload_bytes, e.rule and e.rule[0]) for e in sums] == [
        ("output", 32 * 4, ""),
        ("stacks.0.0.up", 16 * 4, "stacks.*.*"),
    ]


def test_parts_of_a_batch_repeat_forward_and_backward() -> None:
    once, twice = (
        traced(stack("parallel=fsdp2_tp2", "model.depths=[1]", f"train.accumulate={n}")).ledger
        for n in (1, 2)
    )
    for phase, times in (("forward", 2), ("backward", 2), ("loss", 1), ("clip", 1)):
        one, other = ([t for t in told(entries) if t[0] == phase] for entries in (once, twice))
        assert other == one * times


def test_an_optimizer_that_is_not_fused_sends_nothing_more() -> None:
    # Gradients are summed before: one that met partial ones would sum them in every operation.
    fused, loop = (
        traced(llama("parallel=tp2", "model.n_layers=1", f"optim.fused={f}")).ledger
        for f in ("true", "false")
    )
    assert fused == loop and not [e for e in fused if e.phase == "optimizer"]


def test_wire_bytes_are_what_the_best_algorithms_send() -> None:
    assert wire_bytes("all_gather", 800, 8) == wire_bytes("reduce_scatter", 800, 8) == 700
    assert wire_bytes("all_to_all", 800, 8) == 700
    assert wire_bytes("all_reduce", 800, 8) == 1400
    assert wire_bytes("broadcast", 800, 8) == wire_bytes("send", 800, 8) == 800
    assert wire_bytes("recv", 800, 8) == 0  # so that a total of what ranks send counts a message once


def entry(phase: str, kind: str, payload: int, axis: str = "tp") -> Collective:
    return Collective(
        phase, kind, axis, 2, payload, payload // 2, "float32", "a.b", ("a.*", "plan.yaml", 3), False
    )


def test_an_entry_in_the_document_names_the_rule() -> None:
    made = entry("forward", "all_gather", 8).as_json()
    assert made["rule"] == {"key": "a.*", "file": "plan.yaml", "line": 3}
    assert set(made) == set(Collective.__dataclass_fields__) - {"largest", "turn"}


REAL = {
    "fsdp2 checkpoint": ("parallel=fsdp2", CHECKPOINT.format("layers")),
    "tp2 bf16": ("parallel=tp2", "train.dtype=bfloat16"),
    "cp2": ("parallel=cp2",),
    "fsdp2_tp2": ("parallel=fsdp2_tp2",),
    "hsdp2x2 accumulate 2": ("parallel=hsdp2x2", "train.accumulate=2"),
}
REAL |= {
    f"float8 {recipe} {preset}": (f"parallel={preset}", in_float8(recipe))
    for recipe in FLOAT8_RECIPES
    for preset in ("tp2", "fsdp2_tp2", "cp2")
}
REAL |= {
    f"float8 gathered {preset}": (f"parallel={preset}", in_float8("tensorwise", GATHERED))
    for preset in ("fsdp2", "fsdp2_tp2", "hsdp2x2")
}
DEFAULT = ("fsdp2_tp2", "float8 gathered fsdp2_tp2")
# Each group runs in one start of ranks.
MORE = {
    2: {
        "tp2 llama_tp checkpoint": ("parallel=tp2", "plan=llama_tp", CHECKPOINT.format("layers")),
        "cp2 keep_gathered": ("parallel=cp2", "++parallel.styles.context-parallel.keep_gathered=true"),
        "fsdp2 min_size": ("parallel=fsdp2", "++parallel.styles.fsdp.min_size=5000"),
        "fsdp2 tied": ("parallel=fsdp2", "+model.tie_embeddings=true"),
        "dp2 bf16": ("parallel.mesh.dp_replicate=2", "train.dtype=bfloat16"),
        "tp2 selective": ("parallel=tp2", SELECTIVE.format("layers")),
        "tp2 not fused": ("parallel=tp2", "optim.fused=false", "train.clip=null"),
    },
    4: {
        "cp2_tp2 bf16 checkpoint": ("parallel=cp2_tp2", "train.dtype=bfloat16", CHECKPOINT.format("layers")),
        "fsdp2 cp2": ("parallel.mesh.dp_shard=2", "parallel.mesh.cp=2"),
        "hsdp 2 replicas tp2": ("parallel.mesh.dp_replicate=2", "parallel.mesh.tp=2"),
        "fsdp4 checkpoint accumulate 2": (
            "parallel=fsdp4",
            "train.accumulate=2",
            CHECKPOINT.format("layers"),
        ),
        "fsdp2_tp2 no reshard": ("parallel=fsdp2_tp2", "++parallel.styles.fsdp.reshard_after_forward=false"),
    },
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", chosen(REAL, DEFAULT))
def test_real_ranks_send_entry_by_entry_what_is_predicted(name: str) -> None:
    setup = llama("model.n_layers=1", *REAL[name])
    ranks = setup.mesh.world_size
    [real] = real_ledgers([setup])
    # Everything divides, so that all ranks do alike.
    assert real == [traced(setup, ranks - 1).ledger] * ranks
    assert real[0]


def test_weights_in_float8_travel_as_bytes_behind_one_reduction_of_their_largest_values() -> None:
    """Of a layer 7 weights, and two norms in float32; tp has half of the weights."""
    ledger = traced(llama("model.n_layers=1", "parallel=fsdp2_tp2", in_float8("tensorwise", GATHERED))).ledger
    weights = (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128) // 2
    norms = 2 * 64 * 4
    of_layer = [e for e in ledger if e.module == "layers.0" and e.axis == "dp_shard"]
    assert [(e.phase, e.kind, e.payload_bytes, e.dtype) for e in of_layer] == [
        ("forward", "all_reduce", 7 * 4, "float32"),
        ("forward", "all_gather", weights + norms, "uint8"),
        ("backward", "all_reduce", 7 * 4, "float32"),
        ("backward", "all_gather", weights + norms, "uint8"),
        ("backward", "reduce_scatter", 4 * weights + norms, "float32"),
    ]
    assert {e.rule and e.rule[0] for e in of_layer} == {"layers.*"}


def test_gradients_travel_as_the_rule_for_fsdp_says_and_the_loss_and_the_norm_in_float32() -> None:
    """Computed in bfloat16 and float8; a narrower dtype of gradients leaves the loss and the norm as they are."""
    for reduced, options in (("float32", "reduce_dtype: float32"), ("bfloat16", "reduce_dtype: bfloat16")):
        gathered = f"layers.*: {{style: fsdp, gather: float8, {options}}}"
        rules = in_float8("tensorwise", gathered)
        ledger = traced(llama("model.n_layers=1", "parallel=fsdp2", "train.dtype=bfloat16", rules)).ledger
        of_layer = {(e.kind, e.dtype) for e in ledger if e.module == "layers.0" and e.kind != "all_reduce"}
        assert of_layer == {("all_gather", "uint8"), ("reduce_scatter", reduced)}
        assert [e.dtype for e in ledger if e.phase in ("loss", "clip")] == ["float32", "float32"]


@pytest.mark.ranks
def test_ulysses_inside_a_ring_sends_over_cp_what_is_predicted_and_the_closed_form_says() -> None:
    """Its rows and columns are parts of cp. A rank's attention sends its closed form: of the grid, rank r is r // U."""
    setup = llama(
        *("parallel=cp4", "model.n_layers=1", "model.n_heads=8", "model.n_kv_heads=4"),
        *(
            "++parallel.styles.context-parallel.method=ulysses-ring",
            "++parallel.styles.context-parallel.ulysses_degree=2",
        ),
    )
    predicted, [real] = predicted_ledgers(setup), real_ledgers([setup])
    assert real == predicted
    keys_and_values = (
        2 * 4 * 8 * (8 * 32 // 4) * 4
    )  # heads of 8 numbers, 8 sequences of 32 rows over 4 ranks, float32
    for rank, ledger in enumerate(predicted):
        attention = [e for e in ledger if e.module == "layers.0.attention.inner" and e.kind != "recv"]
        assert {(e.axis, e.kind) for e in attention} == {("cp", "all_to_all"), ("cp", "send")}
        said = sent("ulysses-ring", Heads(8, 4), 4, rank, is_causal=True, degree=2)
        assert sum(e.wire_bytes for e in attention) == said * keys_and_values


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", MORE)
def test_real_ranks_send_what_is_predicted_of_each(ranks: int) -> None:
    setups = {name: llama(*overrides) for name, overrides in MORE[ranks].items()}
    uneven = ("model.dim=48", "model.n_heads=4", "model.n_kv_heads=2", "model.vocab_size=250")
    tokens = tuple(f"model.batch.{name}.range=[0,250]" for name in ("input_ids", "labels"))
    setups["uneven"] = llama("parallel.mesh.dp_shard=2", f"parallel.mesh.tp={ranks // 2}", *uneven, *tokens)
    setups["gpt"] = setup_of(*GPT, "parallel.mesh.dp_shard=2", f"parallel.mesh.tp={ranks // 2}")
    compare(setups)


@pytest.mark.slow
@pytest.mark.ranks
def test_three_real_ranks_with_shards_of_several_sizes() -> None:
    compare({"fsdp3": llama("parallel.mesh.dp_shard=3", "train.batch_size=6")})


def compare(setups: dict[str, Setup]) -> None:
    for name, setup, real in zip(setups, setups.values(), real_ledgers([*setups.values()]), strict=True):
        assert real == predicted_ledgers(setup), name
