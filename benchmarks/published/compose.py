"""A published run as an ordinary configuration, and what of it the configuration cannot say."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.published.mixtures import Mixture, is_mixture, mixture_of, vocabulary_of, why_not
from benchmarks.published.pipelines import pipeline_of, rows_of_microbatch
from benchmarks.published.rows import Row

CONF = Path(__file__).parent / "conf"
KEPT_PARTS = 2
"""Parts of an accumulated batch that are traced; the others repeat the last of them."""

FIRST_YEAR = 0.85
"""The share of today's rates that libraries reach on a device whose generation is new to them. It is assumed, not fitted: of the
sources here only one has such runs.
"""

_FILES = {"a100": "a100", "h100": "h100", "h200": "h200", "gb200": "gb200", "gb300": "gb300", "b200": "b200"}


@dataclass(frozen=True)
class Composed:
    """`overrides` compose the configuration. `parts` are the parts of the whole batch.

    `precision` is the dtype of the linear layers' products. `deferred`: gradients are reduced and parameters gathered once a
    step, not once a part. `flash_2`: attention is FlashAttention 2, torch's choice on Hopper before torch 2.11, instead of
    cuDNN's. `plain`: no operators are dispatched on DTensors. `fused`: what `fused.py` says of Megatron's stack;
    `rows_in_place`: what it says of experts.
    `overlapped_tp`: collectives over tp run beside the products. `small_gathers`: parameters are gathered in 8 bits;
    `small_tp_gathers`: activations over tp are. `cp_payload` multiplies what attention sends over cp. `rate` multiplies the rates
    of products and attention. `kept_outputs` are bytes: torch's pipelines keep the outputs of all microbatches until the step
    ends. `loss_bytes` are what torch's loss holds more than this project's.
    """

    overrides: tuple[str, ...]
    hardware: str
    hardware_values: dict[str, Any] = field(default_factory=dict)
    parts: int = 1
    precision: str = "bfloat16"
    deferred: bool = False
    flash_2: bool = False
    plain: bool = False
    fused: bool = False
    rows_in_place: bool = False
    overlapped_tp: bool = False
    small_gathers: bool = False
    small_tp_gathers: bool = False
    cp_payload: float = 1.0
    rate: float = 1.0
    kept_outputs: int = 0
    loss_bytes: int = 0


def left_out(row: Row) -> str | None:
    """Why a row cannot be composed; None for one that can."""
    if row.tokens_per_second is None:
        return "no throughput"
    if any(word in f"{row.techniques} {row.run.get('note')}".lower() for word in ("lora", "peft")):
        return "trains adapters alone, whose sizes are not in the file"
    if is_mixture(row):
        if (why := why_not(row)) is not None:
            return f"experts: {why}"
    elif not all(row.model.get(size) for size in ("layers", "hidden", "ffn", "heads", "vocab")):
        return "no sizes of the model"
    if hardware_of(row) is None:
        return "no such hardware"
    return None


def hardware_of(row: Row) -> str | None:
    """The file of configs/hardware that describes the row's GPU."""
    kind = str(row.gpu.get("kind", "")).lower()
    return next(
        (file for word, file in sorted(_FILES.items(), key=lambda x: -len(x[0])) if word in kind), None
    )


def compose(row: Row) -> Composed:
    """The configuration of a row."""
    run, mesh = row.run, row.mesh
    library, mixture = _is_library(row), mixture_of(row) if is_mixture(row) else None
    replicas = mesh.get("dp_replicate", 1)
    data = replicas * mesh.get("dp_shard", 1)
    batch = int(run.get("global_batch") or data * int(run.get("micro_batch") or 1))
    rows = max(1, batch // data)
    micro = rows_of_microbatch(row, rows)
    pipelined = mesh.get("pp", 1) > 1
    parts = max(1, rows // micro)
    kept = (
        parts if pipelined else min(parts, KEPT_PARTS)
    )  # a few microbatches of a pipeline stand for all in any case
    # A distributed optimizer shards over the replicas what fsdp shards, and keeps the parameters.
    sharded = data if library and replicas > 1 else mesh.get("dp_shard", 1)
    axes = {
        "pp": mesh.get("pp", 1),
        "dp_replicate": data // sharded,
        "dp_shard": sharded,
        "cp": mesh.get("cp", 1),
        "tp": mesh.get("tp", 1),
        **({"ep": mesh.get("ep", 1)} if mixture is not None else {}),
    }
    overrides = [
        f"hydra.searchpath=[file://{CONF}]",
        *(_model(row) if mixture is None else _mixture(mixture)),
        *(f"parallel.mesh.{axis}={size}" for axis, size in axes.items()),
        f"train.seq_len={run['seq_len']}",
        f"train.batch_size={micro * data * kept}",
        f"train.accumulate={1 if pipelined else kept}",
        "device=cuda",
        "train.dtype=bfloat16",
        *(_rules(row, library) if mixture is None else _rules_of_mixture(mixture)),
    ]
    if pipelined:
        overrides += pipeline_of(row, parts)
    elif (replicas > 1 and library) or "SHARD_GRAD_OP" in row.techniques:
        overrides.append("++parallel.styles.fsdp.reshard_after_forward=false")
    if "foundry" in row.source or library:
        overrides.append("parallel.styles.fsdp.reduce_dtype=bfloat16")
    if "Korthikanti" in row.source and "sequence parallelism" not in str(run.get("ac")):
        overrides.append("++parallel.layouts.stream=replicate")
    hardware = hardware_of(row)
    assert hardware is not None, row.id  # noqa: S101
    return Composed(
        tuple(overrides),
        hardware,
        _hardware_values(row),
        1 if pipelined else parts,
        _precision(str(run["precision"])),
        # A pipeline does so by itself. Automodel's recipes of mixtures do, with `enable_fsdp_optimizations`.
        deferred=(mixture is not None or (library and replicas > 1)) and not pipelined,
        flash_2=hardware in ("h100", "h200") and not library,
        plain=row.source != "torchtitan",  # of other stacks it is not known, and neither is their host
        fused=(library and mixture is None) or "Korthikanti" in row.source,
        rows_in_place=mixture is not None and "DeepEP" in row.techniques,
        overlapped_tp=_overlaps_tp(row),
        small_gathers=str(run["precision"]).startswith("fp8-tensorwise"),
        # torchao's tensor parallelism casts to 8 bits before it gathers, with one scale for a tensor alone.
        small_tp_gathers=str(run["precision"]).startswith("fp8-tensorwise") and not library,
        # torchtitan repeats key-value heads, one for each query head, before attention sends them around.
        cp_payload=_repeats(row) if row.source == "torchtitan" else 1.0,
        rate=FIRST_YEAR
        if "foundry" in row.source and hardware == "h100"
        else 1.0,  # its H100 tables are of 2023
        kept_outputs=0 if library or not pipelined else (parts - 1) * _logits(row, micro),
        # Torch's backward of a loss has three copies of the logits in float32, over sharded logits four. This project's has the
        # logits and two gradients of them in bfloat16. llm-foundry's is one kernel.
        loss_bytes=0
        if library or "foundry" in row.source
        else ((4 if mesh.get("tp", 1) > 1 else 3) * 2 - 3) * _logits(row, micro),
    )


def _logits(row: Row, rows: int) -> int:
    """The bytes of a microbatch's logits on one rank, in bfloat16 and sharded over the vocabulary."""
    ranks = row.mesh.get("cp", 1) * row.mesh.get("tp", 1)
    return 2 * rows * int(row.run["seq_len"]) * vocabulary_of(row) // ranks


def _repeats(row: Row) -> float:
    """How many query heads share a key-value head."""
    heads = int(row.model.get("heads") or 1)
    return heads / int(row.model.get("kv_heads") or heads)


def _overlaps_tp(row: Row) -> bool:
    """Whether collectives over tp run beside the products: torchtitan's asynchronous ones, or those of the Transformer Engine,
    which Megatron-Bridge's recipes of dense models take.
    """
    techniques = row.techniques.lower()
    return "async" in techniques or "overlapped dp, tp" in techniques or row.source == "Megatron-Bridge"


def _is_library(row: Row) -> bool:
    """Whether the run uses Megatron's stack, of fused kernels."""
    return any(word in row.source for word in ("Megatron", "Automodel")) and "FSDP2" not in row.techniques


def _model(row: Row) -> list[str]:
    m, tp = row.model, row.mesh.get("tp", 1)
    sizes = {
        "vocab_size": -(-int(m["vocab"]) // tp) * tp,  # padded, so that ranks have equal parts of it
        "dim": m["hidden"],
        "n_layers": m["layers"],
        "n_heads": m["heads"],
        "hidden_dim": m["ffn"],
        "tie_embeddings": bool(m.get("tied")),
    }
    if m.get("gated"):
        # A key-value head that several ranks share is computed by each of them.
        kv_heads = max(int(m.get("kv_heads") or m["heads"]), min(tp, int(m["heads"])))
        sizes |= {"n_kv_heads": kv_heads, "max_seq_len": row.run["seq_len"]}
        return ["model=published_llama", *(f"++model.{key}={value}" for key, value in sizes.items())]
    if "Korthikanti" in row.source:
        sizes["written_out"] = True
    return ["model=published_gpt", *(f"++model.{key}={value}" for key, value in sizes.items())]


def _mixture(mixture: Mixture) -> list[str]:
    sizes = (f"++model.config.{key}={value}" for key, value in mixture.config.items())
    return ["model=published_mixture", f"model.plan={mixture.plan}", *sizes]


def _rules_of_mixture(mixture: Mixture) -> list[str]:
    """Attention and norms are fused kernels; what a layer recomputes it sends again."""
    rules = ["model.layers.*: checkpoint"] * mixture.recomputed
    rules.append("model.layers.*.{self_attn,input_layernorm,post_attention_layernorm}: compile")
    return [f"rules=[{','.join(chr(34) + rule + chr(34) for rule in rules)}]"]


def _rules(row: Row, library: bool) -> list[str]:
    ac = str(row.run.get("ac") or "none")
    rules = []
    if ac == "full":
        rules.append("layers.*: checkpoint")
    elif ac.startswith("selective (attention)"):
        rules.append("layers.*.attention.inner: checkpoint")
    elif ac.startswith("selective"):
        rules.append("layers.*: {style: checkpoint, mode: alternate}")  # torchtitan's, of operators
    compiled = row.run.get("compile")
    # What is not said is taken to be fused as well as compiled code is, but for kernels of before 2022.
    if compiled or library or (compiled is None and "Korthikanti" not in row.source):
        # Recomputation of DTensors is not compiled: it goes around modules that are.
        inner = bool(rules) and row.mesh.get("tp", 1) > 1
        rules.append(
            f"layers.*{'.{attention,feed_forward,attention_norm,ffn_norm}' if inner else ''}: compile"
        )
    return [f"rules=[{','.join(chr(34) + rule + chr(34) for rule in rules)}]"] if rules else []


def _precision(name: str) -> str:
    if "rowwise" in name:
        return "float8_rowwise"
    return "float4" if "fp4" in name else "float8" if "fp8" in name else "bfloat16"


def _hardware_values(row: Row) -> dict[str, Any]:
    """What the row says of its machines, over the hardware file's own."""
    gpu = row.gpu
    values: dict[str, Any] = {"devices_per_node": int(gpu.get("per_node") or 8)}
    if gpu.get("power_w"):
        values["power_w"] = float(gpu["power_w"])
    if gpu.get("hbm_tb_s"):
        values["memory_gb_per_s"] = float(gpu["hbm_tb_s"]) * 1e3
    network = str(gpu.get("inter_node") or "")
    if "domain of 72" in network:
        values["devices_per_node"] = 72
    elif (rate := _network(network, values["devices_per_node"])) is not None:
        values["network_gb_per_s"] = rate
    return values


def _network(words: str, per_node: int) -> float | None:
    """GB/s of a device between nodes, each way: "400 Gb/s per GPU", "8 x HDR 200 Gb/s per node", "EFA 3.2 Tb/s per node"; of a
    device, where neither is said. None where there is no rate.
    """
    found = re.search(r"(?:(\d+) x .*?)?([\d.]+) ?([GT])b/s", words)
    if found is None:
        return None
    adapters, number, unit = found.groups()
    rate = int(adapters or 1) * float(number) * (125.0 if unit == "T" else 0.125)
    return rate / per_node if "per node" in words else rate
