"""Rows as other sources write them: with other meshes, other words, and without what a table does not print."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.published.compose import compose, left_out
from benchmarks.published.predictions import predict_row, prepare
from benchmarks.published.rows import Row
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from tests.chosen import chosen

RUN: dict[str, Any] = {
    "id": "one", "model": "m", "dense": True, "gpu": "g", "gpus": 16,
    "mesh": {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 4}, "seq_len": 512, "global_batch": 16, "micro_batch": 2,
    "precision": "bf16", "ac": "none", "compile": True, "techniques": "FSDP2 + TP",
    "measured": {"tokens_per_second_per_gpu": 1e4},
    "source": {"repo": "a/b"},
}  # fmt: skip
MODEL: dict[str, Any] = {
    "layers": 6, "hidden": 512, "ffn": 1536, "gated": True, "heads": 8, "kv_heads": 2, "vocab": 1001, "tied": False,
    "params": 20_000_000,
}  # fmt: skip
GPU: dict[str, Any] = {
    "kind": "H200-SXM",
    "per_node": 4,
    "bf16_tflops": 989,
    "hbm_tb_s": 4.8,
    "memory_gb": 141,
}


def row(sizes: dict[str, Any] | None = None, device: dict[str, Any] | None = None, **changes: Any) -> Row:
    run = {**copy.deepcopy(RUN), **changes}
    return Row(run, {**GPU, **(device or {})}, {**MODEL, **(sizes or {})})


ODD: dict[str, Row] = {
    "as it is": row(),
    "a batch that microbatches do not divide": row(global_batch=20, micro_batch=2),
    "a microbatch larger than a rank's rows": row(micro_batch=64),
    "nothing said of recomputation, kernels or microbatches": row(ac=None, compile=None, micro_batch=None, techniques=None),
    "no batch": row(global_batch=None),
    "axes without a size": row(mesh={"dp_shard": 4, "tp": 4, "cp": None, "pp": None}),
    "replicas alone": row(gpus=4, mesh={"pp": 1, "dp_replicate": 4, "dp_shard": 1, "cp": 1, "tp": 1}),
    "cp": row(gpus=8, mesh={"dp_shard": 2, "cp": 2, "tp": 2}),
    "a model without key-value heads": row({"kv_heads": None}),
    "a model without gates": row({"gated": False, "kv_heads": None, "tied": None}),
    "tied": row({"tied": True}),
    "selective": row(ac="selective (op)"),
    "8 bits": row(precision="fp8-delayed"),
    "mixed bf16": row(precision="bf16-mixed"),
    "a GPU in other words": row(device={"kind": "NVIDIA A100 80GB", "per_node": None, "hbm_tb_s": None}),
    "layers that stages do not divide": row(gpus=16, mesh={"pp": 4, "dp_shard": 2, "tp": 2}, global_batch=16, micro_batch=1),
    "interleaved, microbatches in unequal rounds": row(
        gpus=4, mesh={"pp": 4, "dp_shard": 1}, global_batch=10, micro_batch=1, schedule="Interleaved1F1B"
    ),
    "zero bubble": row(gpus=4, mesh={"pp": 2, "dp_shard": 2}, micro_batch=1, schedule="ZBVZeroBubble"),
    "gpipe": row(gpus=4, mesh={"pp": 2, "dp_shard": 2}, micro_batch=1, schedule="GPipe"),
}  # fmt: skip


@pytest.mark.parametrize("name", chosen(list(ODD), ("interleaved, microbatches in unequal rounds",)))
def test_a_row_in_other_words_is_a_configuration_of_its_mesh(name: str) -> None:
    one = ODD[name]
    assert left_out(one) is None
    setup = from_config(*compose_config(list(compose(one).overrides)))
    assert setup.mesh.world_size == one.run["gpus"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_a_row_in_other_words_is_predicted(name: str) -> None:
    found = predict_row(prepare(ODD[name]))
    assert found.predicted > 0 and found.in_use > 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"measured": {}}, "no throughput"),
        ({"dense": False, "model": "Kolibri 9B"}, "the sizes of Kolibri 9B"),
        ({"dense": False, "model": "GPT-OSS 120B"}, "sinks"),
        ({"techniques": "FSDP2, LoRA"}, "adapters"),
    ],
)
def test_a_row_that_cannot_be_composed_says_why(changes: dict[str, Any], why: str) -> None:
    found = left_out(row(**changes))
    assert found is not None and why in found


def test_rows_without_sizes_or_hardware_say_so() -> None:
    assert left_out(row({"layers": None})) == "no sizes of the model"
    assert left_out(row(device={"kind": "abacus"})) == "no such hardware"


@pytest.mark.parametrize(
    ("words", "rate"),
    [("RDMA 400 Gb/s per GPU", 50.0), ("InfiniBand NDR 400 Gb/s", 50.0), ("8 x HDR 200 Gb/s per node", 50.0),
     ("EFA 3.2 Tb/s per node", 100.0), ("1600 Gb/s per node", 50.0), ("Ethernet", None), (None, None)],
)  # fmt: skip
def test_the_network_is_what_the_row_says_of_it(words: str | None, rate: float | None) -> None:
    """Of each of four devices of a node."""
    assert compose(row(device={"inter_node": words})).hardware_values.get("network_gb_per_s") == rate
