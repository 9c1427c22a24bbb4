"""Plans of a GPT, and of ten layers of which one is odd."""

from tests.silent.case import EVERYWHERE, Model, cases, changed, without

GPT = Model("gpt", "tests.silent.models.gpt.Gpt")
HAND = Model("gpt by hand", "tests.silent.models.gpt.Gpt", arguments={"attention": "hand"})
WINDOW = Model("gpt window", "tests.silent.models.gpt.Gpt", arguments={"attention": "window"})
TEN = Model("ten", "tests.silent.models.gpt.Ten")

SPLIT = """\
layouts: {stream: shard(1)}
rules:
  words: {style: rowwise, input: replicate, output: stream}
  places: {style: prepare-output, output: replicate -> stream}
  blocks.*.norm1: {style: sequence, layout: stream}
  blocks.*.norm2: {style: sequence, layout: stream}
  blocks.*.attn: [{style: prepare-input, input: {x: stream -> replicate}}, context-parallel]
  blocks.*.attn.qkv: {style: colwise, packed: [1, 1, 1]}
  blocks.*.attn.out: {style: rowwise, output: stream}
  blocks.*.up: {style: colwise, input: stream}
  blocks.*.down: {style: rowwise, output: stream}
  norm: {style: sequence, layout: stream}
  head: {style: colwise, input: stream, output: shard(-1), local: false}
  blocks.*: fsdp
  "": fsdp
buffers: {batch: {input_ids: 1, labels: {dim: 1, pad: -100}, positions: positions}}
"""
WHOLE = """\
rules:
  words: {style: rowwise, input: replicate}
  blocks.*.attn: context-parallel
  blocks.*.attn.qkv: {style: colwise, packed: [1, 1, 1]}
  blocks.*.attn.out: rowwise
  blocks.*.up: colwise
  blocks.*.down: rowwise
  head: {style: colwise, output: replicate}
  blocks.*: fsdp
  "": fsdp
buffers: {batch: {input_ids: 1, labels: {dim: 1, pad: -100}, positions: positions}}
"""
CP = """\
rules:
  blocks.*.attn: context-parallel
  "": fsdp
buffers: {batch: {input_ids: 1, labels: {dim: 1, pad: -100}, positions: positions}}
"""

TEN_SPLIT = """\
rules:
  words: {style: rowwise, input: replicate, output: shard(1)}
  layers.*.norm: sequence
  layers.*.up: {style: colwise, input: shard(1)}
  layers.*.down: {style: rowwise, output: shard(1)}
  layers.6.gate: {style: shard-params, params: shard(0)}
  layers.6.shift: {style: replicate}
  head: {style: colwise, input: shard(1), output: replicate}
  "": fsdp
"""
TEN_WHOLE = """\
rules:
  words: {style: rowwise, input: replicate}
  layers.*.up: colwise
  layers.*.down: rowwise
  layers.6.gate: {style: shard-params, params: shard(0)}
  head: {style: colwise, output: replicate}
  "": fsdp
"""

CASES = [
    *cases(GPT, "usual", SPLIT, tp2="right", fsdp2_tp2="right", cp2="right", cp2_tp2="right", fsdp2="right"),
    *cases(GPT, "whole stream", WHOLE, tp2="right", cp2_tp2="right"),
    *cases(GPT, "cp alone", CP, cp2="right"),
    *cases(
        GPT,
        "no balance",
        changed(CP, ("attn: context-parallel", "attn: {style: context-parallel, balance: none}")),
        cp2="right",
    ),
    *cases(
        GPT,
        "ring",
        changed(CP, ("attn: context-parallel", "attn: {style: context-parallel, method: ring}")),
        cp2="right",
    ),
    *cases(GPT, "qkv split as one", changed(WHOLE, ("colwise, packed: [1, 1, 1]", "colwise")), tp2="wrong"),
    *cases(
        GPT,
        "qkv in two parts",
        changed(WHOLE, ("packed: [1, 1, 1]", "packed: [1, 2]")),
        tp2="wrong",
        fsdp2_tp2="wrong",
    ),
    *cases(
        GPT,
        "qkv in parts of another order",
        changed(WHOLE, ("packed: [1, 1, 1]", "packed: [2, 1]")),
        tp2="wrong",
    ),
    *cases(GPT, "attention not declared", without(CP, "blocks.*.attn"), cp2="wrong"),
    *cases(GPT, "one attention not declared", changed(CP, ("blocks.*.attn", "blocks.0.attn")), cp2="wrong"),
    *cases(
        GPT,
        "attention not declared under tp",
        changed(WHOLE, ("  blocks.*.attn: context-parallel\n", "")),
        cp2_tp2="wrong",
        tp2="right",
    ),
    *cases(GPT, "positions not dealt", changed(CP, (", positions: positions", "")), cp2="wrong"),
    *cases(
        GPT,
        "positions not dealt under tp",
        changed(WHOLE, (", positions: positions", "")),
        cp2_tp2="wrong",
        tp2="right",
    ),
    *cases(GPT, "labels not dealt", changed(CP, ("labels: {dim: 1, pad: -100}, ", "")), cp2="fails"),
    *cases(
        GPT,
        "nothing dealt",
        changed(
            CP, ("\nbuffers: {batch: {input_ids: 1, labels: {dim: 1, pad: -100}, positions: positions}}", "")
        ),
        why="every rank of cp has the whole sequence",
        cp2="wrong",
    ),
    *cases(GPT, "norms forgotten", without(SPLIT, "blocks.*.norm1", "blocks.*.norm2"), tp2="wrong"),
    *cases(
        GPT,
        "one norm forgotten",
        changed(SPLIT, ("blocks.*.norm2", "blocks.0.norm2")),
        tp2="wrong",
        cp2_tp2="wrong",
    ),
    *cases(GPT, "places not split", without(SPLIT, "places"), tp2="fails"),
    *cases(
        GPT, "down colwise", changed(WHOLE, ("blocks.*.down: rowwise", "blocks.*.down: colwise")), tp2="fails"
    ),
    *cases(
        GPT,
        "up rowwise",
        changed(WHOLE, ("blocks.*.up: colwise", "blocks.*.up: {style: rowwise, input: replicate}")),
        tp2="fails",
    ),
    *cases(GPT, "out without a rule", without(WHOLE, "blocks.*.attn.out"), tp2="fails"),
    *cases(
        GPT,
        "up and down swapped",
        changed(
            WHOLE,
            ("blocks.*.up: colwise", "blocks.*.up: {style: rowwise, input: replicate}"),
            ("blocks.*.down: rowwise", "blocks.*.down: {style: colwise, output: replicate}"),
        ),
        why="each makes its input and output whole",
        tp2="right",
    ),
    *cases(
        GPT,
        "whole between",
        changed(
            WHOLE,
            ("blocks.*.up: colwise", "blocks.*.up: {style: colwise, output: replicate}"),
            ("blocks.*.down: rowwise", "blocks.*.down: {style: rowwise, input: replicate}"),
        ),
        why="gathered and cut again",
        tp2="right",
    ),
    *cases(
        GPT,
        "out left partial",
        changed(
            WHOLE, ("blocks.*.attn.out: rowwise", "blocks.*.attn.out: {style: rowwise, output: partial}")
        ),
        why="every rank adds its term to the stream",
        tp2="fails",
    ),
    *cases(
        GPT,
        "split stream said to be whole",
        changed(
            SPLIT,
            (
                "blocks.*.up: {style: colwise, input: stream}",
                "blocks.*.up: {style: colwise, input: replicate}",
            ),
        ),
        why="the norm hands on a DTensor, which knows how it lies",
        tp2="right",
    ),
    *cases(
        GPT,
        "norms summed though whole",
        WHOLE.replace(
            "  blocks.*.up: colwise", "  blocks.*.norm2: {style: replicate}\n  blocks.*.up: colwise"
        ),
        why="gradients of a whole norm are summed",
        tp2="wrong",
    ),
    *cases(
        GPT,
        "norms whole by name",
        WHOLE.replace(
            "  blocks.*.up: colwise",
            "  blocks.*.norm2: {style: replicate, grad: replicate}\n  blocks.*.up: colwise",
        ),
        tp2="right",
    ),
    *cases(
        GPT,
        "head whole and local",
        changed(
            WHOLE, ("head: {style: colwise, output: replicate}", "head: {style: colwise, output: shard(-1)}")
        ),
        tp2="fails",
    ),
    *cases(
        GPT,
        "checkpointed",
        changed(SPLIT, ("  blocks.*: fsdp", "  blocks.*: [fsdp, checkpoint]")),
        cp2_tp2="right",
    ),
    *cases(HAND, "tp", WHOLE.replace("  blocks.*.attn: context-parallel\n", ""), tp2="right"),
    *cases(
        HAND,
        "whole sequence",
        SPLIT.replace(", context-parallel]", "]"),
        why="plain operations on whole sequences",
        tp2="right",
    ),
    *cases(
        HAND, "cp, plain operations", without(CP, "blocks.*.attn"), why="scores over local keys", cp2="wrong"
    ),
    *cases(HAND, "cp declared, plain operations", CP, why="no call of attention is seen", cp2="fails"),
    *cases(
        HAND,
        "cp gathered",
        changed(
            CP,
            (
                "blocks.*.attn: context-parallel",
                "blocks.*.attn: {style: prepare-io, axis: cp, input: {x: shard(1) -> replicate}, "
                "output: replicate -> shard(1), local_input: true}",
            ),
        ),
        why="the sequence is gathered for attention",
        cp2="right",
    ),
    *cases(
        WINDOW,
        "tp",
        WHOLE.replace("  blocks.*.attn: context-parallel\n", ""),
        why="the mask has the whole length",
        tp2="right",
    ),
    *cases(WINDOW, "cp declared", CP, why="the mask has the local length", cp2="fails"),
    *cases(WINDOW, "cp not declared", without(CP, "blocks.*.attn"), cp2="wrong"),
    *cases(TEN, "usual", TEN_WHOLE, tp2="right"),
    *cases(TEN, "split", TEN_SPLIT, tp2="right"),
    *cases(TEN, "shift of the odd layer forgotten", without(TEN_SPLIT, "layers.6.shift"), tp2="wrong"),
    *cases(
        TEN,
        "shift of the odd layer summed though whole",
        changed(TEN_WHOLE, ("  head:", "  layers.6.shift: {style: replicate}\n  head:")),
        tp2="wrong",
    ),
    *cases(TEN, "gate of the odd layer forgotten", without(TEN_WHOLE, "layers.6.gate"), tp2="fails"),
    *cases(
        TEN,
        "gate of the odd layer replicated",
        changed(
            TEN_WHOLE, ("layers.6.gate: {style: shard-params, params: shard(0)}", "layers.6.gate: replicate")
        ),
        tp2="fails",
    ),
    *cases(TEN, "data", "  layers.*: fsdp\n" + EVERYWHERE, fsdp2="right"),
    *cases(
        TEN,
        "norm of one layer forgotten",
        changed(TEN_SPLIT, ("layers.*.norm:", "layers.{0,1,2,3,4,6,7,8,9}.norm:")),
        tp2="wrong",
    ),
]
