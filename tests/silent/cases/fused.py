"""Plans of parallel blocks, and of projections with several parts."""

from tests.silent.case import EVERYWHERE, Model, cases, changed, without
from tests.silent.cases.gpt import GPT

J = Model("gptj", "tests.silent.models.fused.GptJ")
PALM = Model("palm", "tests.silent.models.fused.Palm")
HALVES = Model("gated halves", "tests.silent.models.fused.Gated")
PAIRS = Model("gated interleaved", "tests.silent.models.fused.Gated", arguments={"kind": "interleaved"})
T5 = Model("t5", "tests.silent.models.t5.T5")

PARALLEL = """\
rules:
  wte: {style: rowwise, input: replicate}
  h.*: context-parallel
  h.*.q: colwise
  h.*.k: colwise
  h.*.v: colwise
  h.*.out: rowwise
  h.*.fc_in: colwise
  h.*.fc_out: rowwise
  lm_head: {style: colwise, output: replicate}
  "": fsdp
buffers: {batch: {input_ids: 1, labels: {dim: 1, pad: -100}}, model: {cos: 0, sin: 0}}
"""
ONE = """\
rules:
  blocks.*: {style: shard-params, divide: [width, heads, hidden]}
  blocks.*.wi: {style: colwise, packed: [width, width, width, hidden, hidden]}
  blocks.*.wo: {style: rowwise, packed: [width, hidden]}
  "": fsdp
"""
GATES = """\
rules:
  blocks.*.gate_up: {style: colwise, packed: [1, 1]}
  blocks.*.down: rowwise
  "": fsdp
"""
RELATIVE = """\
rules:
  bias: {style: prepare-input, axis: cp, input: {keys: shard(0) -> replicate}}
  bias.table: colwise
  layers.*.attention: context-parallel
  layers.*.attention.q: colwise
  layers.*.attention.k: colwise
  layers.*.attention.v: colwise
  layers.*.attention.o: rowwise
  layers.*.wi: colwise
  layers.*.wo: rowwise
  "": fsdp
buffers: {batch: {input_ids: 1, labels: {dim: 1, pad: -100}, positions: positions}}
"""

BIASES = """\
rules:
  blocks.*.up: colwise
  blocks.*.down:
    - {style: shard-params, params: {weight: shard(1)}}
    - {style: prepare-output, output: partial -> replicate}
"""

CASES = [
    *cases(J, "usual", PARALLEL, tp2="right", cp2="right", cp2_tp2="right", fsdp2_tp2="right"),
    *cases(
        J,
        "tables not dealt",
        changed(PARALLEL, (", model: {cos: 0, sin: 0}", "")),
        why="rotary angles of local positions",
        cp2="wrong",
        tp2="right",
    ),
    *cases(J, "one table not dealt", changed(PARALLEL, ("{cos: 0, sin: 0}", "{cos: 0}")), cp2="wrong"),
    *cases(J, "attention not declared", without(PARALLEL, "h.*"), cp2="wrong"),
    *cases(J, "v whole", without(PARALLEL, "h.*.v"), tp2="fails"),
    *cases(J, "fc_out whole", without(PARALLEL, "h.*.fc_out"), tp2="fails"),
    *cases(
        J, "norm summed", changed(PARALLEL, ("  lm_head:", "  h.*.ln: replicate\n  lm_head:")), tp2="wrong"
    ),
    *cases(PALM, "usual", ONE, tp2="right", fsdp2_tp2="right"),
    *cases(
        PALM, "out in one part", changed(ONE, ("rowwise, packed: [width, hidden]", "rowwise")), tp2="wrong"
    ),
    *cases(
        PALM,
        "out in another order",
        changed(ONE, ("rowwise, packed: [width, hidden]", "rowwise, packed: [hidden, width]")),
        tp2="wrong",
    ),
    *cases(
        PALM,
        "in as one part",
        changed(ONE, ("colwise, packed: [width, width, width, hidden, hidden]", "colwise")),
        tp2="wrong",
    ),
    *cases(
        PALM,
        "gate and up as one part",
        changed(ONE, ("hidden, hidden]}\n  blocks.*.wo", "48]}\n  blocks.*.wo")),
        tp2="wrong",
    ),
    *cases(
        PALM,
        "parts by number",
        changed(ONE, ("packed: [width, width, width, hidden, hidden]", "packed: [2, 2, 2, 3, 3]")),
        tp2="right",
    ),
    *cases(
        PALM,
        "parts of another order",
        changed(ONE, ("packed: [width, width, width, hidden, hidden]", "packed: [3, 3, 2, 2, 2]")),
        tp2="wrong",
    ),
    *cases(
        PALM,
        "heads not divided",
        changed(ONE, ("[width, heads, hidden]", "[width, hidden]")),
        why="four heads of half the size",
        tp2="wrong",
    ),
    *cases(HALVES, "packed", GATES, tp2="right", fsdp2_tp2="right"),
    *cases(
        HALVES,
        "not packed",
        changed(GATES, ("{style: colwise, packed: [1, 1]}", "colwise")),
        tp2="wrong",
        fsdp2_tp2="wrong",
    ),
    *cases(HALVES, "packed in three", changed(GATES, ("[1, 1]", "[1, 1, 2]")), tp2="wrong"),
    *cases(
        HALVES,
        "gathered and packed",
        changed(
            GATES,
            ("{style: colwise, packed: [1, 1]}", "{style: colwise, packed: [1, 1], output: replicate}"),
            ("down: rowwise", "down: {style: rowwise, input: replicate}"),
        ),
        why="features come back in a rank's order",
        tp2="fails",
    ),
    *cases(
        HALVES,
        "gathered",
        changed(
            GATES,
            ("{style: colwise, packed: [1, 1]}", "{style: colwise, output: replicate}"),
            ("down: rowwise", "down: {style: rowwise, input: replicate}"),
        ),
        tp2="right",
    ),
    *cases(PAIRS, "plain", changed(GATES, ("{style: colwise, packed: [1, 1]}", "colwise")), tp2="right"),
    *cases(PAIRS, "packed", GATES, tp2="wrong"),
    *cases(T5, "usual", RELATIVE, tp2="right", cp2="right", cp2_tp2="right"),
    *cases(T5, "data", EVERYWHERE, fsdp2="right"),
    *cases(
        T5,
        "bias whole",
        without(RELATIVE, "bias.table"),
        why="a bias of all heads for half of them",
        tp2="fails",
    ),
    *cases(
        T5, "bias of local columns", without(RELATIVE, "bias"), why="the mask has local columns", cp2="fails"
    ),
    *cases(T5, "attention not declared", without(RELATIVE, "bias", "layers.*.attention"), cp2="wrong"),
    *cases(T5, "positions not dealt", changed(RELATIVE, (", positions: positions", "")), cp2="wrong"),
    *cases(
        T5,
        "head and words split",
        changed(RELATIVE, ("rules:\n", "rules:\n  shared: {style: rowwise, input: replicate}\n")),
        why="the tied head reads half of the words",
        tp2="fails",
    ),
    *cases(
        GPT,
        "one bias too many",
        BIASES,
        why="the bias is added by every rank",
        tp2="wrong",
    ),
]
