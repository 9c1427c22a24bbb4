"""Plans of a state space model, latent attention, adapters and mixtures of experts."""

from dataclasses import replace

from tests.silent.case import EVERYWHERE, Model, cases, changed, without

MAMBA = Model("mamba", "tests.silent.models.mamba.Mamba")
MLA = Model("mla", "tests.silent.models.mla.Mla")
LORA = Model("lora", "tests.silent.models.lora.Adapted")
LOOPED = Model("moe looped", "tests.silent.models.moe.Moe")
BATCHED = Model("moe batched", "tests.silent.models.moe.Moe", arguments={"kind": "batched"})
BALANCED = Model("moe balanced", "tests.silent.models.moe.Balanced", loss="tests.silent.models.moe.balanced")
BY_ROW = Model(
    "moe by row", "tests.silent.models.moe.BalancedByRow", loss="tests.silent.models.moe.balanced_rows"
)

TOKENS_SPLIT = "buffers: {batch: {input_ids: 1, labels: {dim: 1, pad: -100}}}\n"
SCAN = """\
rules:
  mixers.*.in_proj: {style: colwise, packed: [1, 1]}
  mixers.*.conv: {style: shard-params, params: {weight: shard(0), bias: shard(0)}}
  mixers.*.x_proj: rowwise
  mixers.*: {style: shard-params, params: {dt: shard(0), log_a: shard(0), skip: shard(0)}}
  mixers.*.out_proj: rowwise
  "": fsdp
"""
GROUPS = changed(
    SCAN,
    (
        "  mixers.*.conv: {style: shard-params, params: {weight: shard(0), bias: shard(0)}}",
        "  mixers.*.conv: {style: shard-params, params: {weight: shard(0), bias: shard(0)}, divide: [groups]}",
    ),
)
SHARED = changed(
    GROUPS,
    (
        "x_proj: rowwise",
        "x_proj: [{style: rowwise}, {style: prepare-output, output: replicate, grad: partial}]",
    ),
)
GATHERED = (
    """\
rules:
  mixers.*: {style: prepare-io, axis: cp, input: {x: shard(1) -> replicate}, output: replicate -> shard(1), local_input: true}
  "": fsdp
"""
    + TOKENS_SPLIT
)

LATENT = """\
rules:
  attns.*.q_up: colwise
  attns.*.kv_up: colwise
  attns.*.kv_down: {style: prepare-output, output: replicate, grad: partial, grad_last: rope}
  attns.*: context-parallel
  attns.*.out: rowwise
  head: {style: colwise, output: replicate}
  "": fsdp
buffers: {batch: {input_ids: 1, labels: {dim: 1, pad: -100}, positions: positions}}
"""

ADAPTED = """\
rules:
  blocks.*.up.base: colwise
  blocks.*.up.b: colwise
  blocks.*.down.base: rowwise
  blocks.*.down.a: rowwise
  "": fsdp
"""
EXPERTS = """\
rules:
  blocks.*.moe.experts.*.up: colwise
  blocks.*.moe.experts.*.down: rowwise
  "": fsdp
"""
STACKED = """\
rules:
  blocks.*.moe:
    - {style: shard-params, params: {up: shard(2), down: shard(1)}}
    - {style: prepare-output, output: {0: partial -> replicate}}
  "": fsdp
"""


def attended(model: Model, name: str) -> Model:
    """The same with an attention before the blocks."""
    return replace(model, target=f"tests.silent.models.attended.{name}")


CASES = [
    *cases(MAMBA, "data", EVERYWHERE, fsdp2="right"),
    *cases(MAMBA, "channels", GROUPS, why="a term of the gradient of b and c on each rank", tp2="wrong"),
    *cases(MAMBA, "channels, shared summed", SHARED, tp2="right", fsdp2_tp2="right"),
    *cases(MAMBA, "groups not divided", SCAN, tp2="fails"),
    *cases(MAMBA, "gates split as one", changed(SHARED, (", packed: [1, 1]", "")), tp2="wrong"),
    *cases(
        MAMBA,
        "decay forgotten",
        changed(SHARED, ("dt: shard(0), log_a: shard(0), skip", "dt: shard(0), skip")),
        tp2="fails",
    ),
    *cases(MAMBA, "scan over a part", EVERYWHERE and "rules:\n" + EVERYWHERE + TOKENS_SPLIT, cp2="wrong"),
    *cases(MAMBA, "scan gathered", GATHERED, cp2="right"),
    *cases(MLA, "latents whole", LATENT, tp2="right", cp2="right", cp2_tp2="right"),
    *cases(
        MLA,
        "shared key not summed",
        without(LATENT, "attns.*.kv_down"),
        why="the rotary key has a rank's heads' gradient",
        tp2="wrong",
    ),
    *cases(
        MLA,
        "all of kv_down summed",
        changed(LATENT, (", grad_last: rope", "")),
        why="the latent's gradient is summed twice",
        tp2="wrong",
    ),
    *cases(MLA, "out forgotten", without(LATENT, "attns.*.out"), tp2="fails"),
    *cases(MLA, "positions not dealt", changed(LATENT, (", positions: positions", "")), cp2="wrong"),
    *cases(MLA, "attention not declared", without(LATENT, "attns.*"), cp2="wrong"),
    *cases(
        MLA,
        "latent norm summed",
        changed(LATENT, ("  head:", "  attns.*.kv_norm: {style: replicate}\n  head:")),
        why="its gradient is whole on each rank",
        tp2="wrong",
    ),
    *cases(LORA, "usual", ADAPTED, tp2="right", fsdp2_tp2="right"),
    *cases(LORA, "b forgotten", without(ADAPTED, "blocks.*.up.b"), tp2="fails"),
    *cases(LORA, "a of down forgotten", without(ADAPTED, "blocks.*.down.a"), tp2="fails"),
    *cases(
        LORA,
        "a of down gathers",
        changed(
            ADAPTED,
            ("down.a: rowwise", "down.a: {style: prepare-input, input: shard(-1) -> replicate, local: true}"),
        ),
        why="the features are gathered for a whole a",
        tp2="right",
    ),
    *cases(LORA, "data, frozen beside trained", "  blocks.*: fsdp\n" + EVERYWHERE, fsdp2="right"),
    *cases(
        LORA,
        "a and b swapped",
        changed(
            ADAPTED,
            ("blocks.*.up.b: colwise", "blocks.*.up.a: {style: colwise}\n  blocks.*.up.b: {style: rowwise}"),
            ("up.base: colwise", "up.base: {style: colwise, output: replicate}"),
            ("down.base: rowwise", "down.base: {style: rowwise, input: replicate}"),
            ("down.a: rowwise", "down.a: {style: rowwise, input: replicate}"),
        ),
        tp2="right",
    ),
    *cases(LOOPED, "experts split", EXPERTS, tp2="right", fsdp2_tp2="right"),
    *cases(LOOPED, "data", EVERYWHERE, fsdp2="right", hsdp2x2="right"),
    *cases(
        LOOPED,
        "an expert a unit",
        "  blocks.*.moe.experts.*: fsdp\n" + EVERYWHERE,
        why="an expert without tokens is not called",
        fsdp2="right",
    ),
    *cases(
        attended(LOOPED, "AttendedMoe"),
        "tokens split",
        "rules:\n  embed.attention: context-parallel\n" + EVERYWHERE + TOKENS_SPLIT,
        why="each token by itself",
        cp2="right",
    ),
    *cases(
        LOOPED,
        "router split",
        changed(EXPERTS, ("rules:\n", "rules:\n  blocks.*.moe.router: colwise\n")),
        why="the best two of a rank's experts",
        tp2="wrong",
    ),
    *cases(
        LOOPED,
        "router summed",
        changed(EXPERTS, ("rules:\n", "rules:\n  blocks.*.moe.router: replicate\n")),
        tp2="wrong",
    ),
    *cases(
        LOOPED,
        "last expert forgotten",
        EXPERTS.replace("experts.*", "experts.{0..2}"),
        why="whole and unsummed, as it should be",
        tp2="right",
    ),
    *cases(BATCHED, "hidden features", STACKED, tp2="wrong"),
    *cases(BATCHED, "down forgotten", changed(STACKED, (", down: shard(1)", "")), tp2="fails"),
    *cases(
        BALANCED,
        "data",
        EVERYWHERE,
        why="products of means over local tokens",
        fsdp2="wrong",
        hsdp2x2="wrong",
    ),
    *cases(
        BALANCED,
        "experts split",
        EXPERTS,
        why="every rank of tp has all tokens",
        tp2="right",
        fsdp2_tp2="wrong",
    ),
    *cases(
        attended(BALANCED, "AttendedBalanced"),
        "tokens split",
        "rules:\n  embed.attention: context-parallel\n" + EVERYWHERE + TOKENS_SPLIT,
        cp2="wrong",
    ),
    *cases(BY_ROW, "data", EVERYWHERE, why="products of means over a row", fsdp2="right"),
    *cases(
        attended(BY_ROW, "AttendedByRow"),
        "tokens split",
        "rules:\n  embed.attention: context-parallel\n" + EVERYWHERE + TOKENS_SPLIT,
        cp2="wrong",
    ),
]
