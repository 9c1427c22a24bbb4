"""Tokens mixed along a split sequence, and features mixed across a split width."""

from tests.silent.case import EVERYWHERE, Model, cases, changed

TARGET = "tests.silent.models.along.Along"
DEALT = "buffers: {batch: {input_ids: 1, labels: {dim: 1, pad: -100}}}\n"
CP = "rules:\n  words.attention: context-parallel\n" + EVERYWHERE + DEALT
PAIR = """\
rules:
  blocks.*.up: colwise
  blocks.*.down: rowwise
  "": fsdp
"""
STREAM = """\
rules:
  words: {style: rowwise, input: replicate, output: shard(1)}
  blocks.*.up: {style: colwise, input: shard(1)}
  blocks.*.down: {style: rowwise, output: shard(1)}
  head: {style: colwise, input: shard(1), output: replicate}
  "": fsdp
"""
WEIGHTED = changed(
    PAIR, ("  blocks.*.up", "  blocks.*: {style: shard-params, params: {weight: shard(0)}}\n  blocks.*.up")
)
HEADS = """\
rules:
  blocks.*.q: colwise
  blocks.*.k: colwise
  blocks.*.v: colwise
  blocks.*.out: rowwise
  "": fsdp
"""
EACH = changed(
    HEADS, ("  blocks.*.out", "  blocks.*.q_norm: replicate\n  blocks.*.k_norm: replicate\n  blocks.*.out")
)
OVER = changed(
    HEADS,
    (
        "  blocks.*.out",
        "  blocks.*.{q,k}_norm: {style: shard-params, params: {weight: shard(0)}}\n  blocks.*.out",
    ),
)
GATHERED = (
    HEADS.replace("q: colwise", "q: {style: colwise, output: replicate}")
    .replace("k: colwise", "k: {style: colwise, output: replicate}")
    .replace(
        "  blocks.*.out: rowwise",
        "  blocks.*.v: {style: colwise, output: replicate}\n  blocks.*.out: {style: rowwise, input: replicate}",
    )
    .replace("  blocks.*.v: colwise\n", "")
)


def model(kind: str) -> Model:
    return Model(f"along {kind}", TARGET, arguments={"kind": kind})


def along(kind: str, **expected):
    """The sequence is dealt out over cp, and nothing else is said."""
    attended = Model(f"along {kind}", "tests.silent.models.attended.AttendedAlong", arguments={"kind": kind})
    return cases(attended, "tokens dealt", CP, **expected)


def stream(kind: str, **expected):
    """The stream is split over tp."""
    return cases(model(kind), "split stream", STREAM, **expected)


def across(kind: str, **expected):
    """The features between the linears are split."""
    return cases(model(kind), "split features", PAIR, **expected)


CASES = [
    *along("Mlp", cp2="right"),
    *along("TokenMlp", cp2="fails"),
    *along("Summed", cp2="wrong"),
    *along("Shifted", cp2="wrong"),
    *along("Rolled", cp2="wrong"),
    *along("Flipped", cp2="right"),
    *along("FlippedTwice", cp2="right"),
    *along("MeanTaken", cp2="wrong"),
    *along("Gate", cp2="wrong"),
    *along("Softmaxed", cp2="wrong"),
    *along("FirstToken", cp2="wrong"),
    *along("Unbound", cp2="right"),
    *along("Reindexed", cp2="right"),
    *along("Bucketed", cp2="right"),
    *along("SortedTokens", cp2="wrong"),
    *along("Decay", cp2="wrong"),
    *along("Convolved", cp2="wrong"),
    *along("Pooled", cp2="right"),
    *along("Fourier", cp2="wrong"),
    *along("LocalMask", cp2="right"),
    *along("HalfMask", cp2="right"),
    *along("NormLimit", cp2="wrong"),
    *cases(model("NormLimit"), "data", "rules:\n" + EVERYWHERE, fsdp2="wrong"),
    *stream("Mlp", tp2="right"),
    *stream("Summed", tp2="wrong", fsdp2_tp2="wrong"),
    *stream("Shifted", tp2="wrong"),
    *stream("Flipped", tp2="wrong"),
    *stream("FlippedTwice", tp2="right"),
    *stream("MeanTaken", tp2="wrong"),
    *stream("Unbound", tp2="right"),
    *stream("Reindexed", tp2="right"),
    *stream("Bucketed", tp2="right"),
    *stream("Decay", tp2="wrong"),
    *stream("Convolved", tp2="wrong"),
    *stream("LocalMask", tp2="right"),
    *stream("NormLimit", tp2="wrong"),
    *stream("FirstToken", tp2="wrong"),
    *across("Summed", tp2="right", fsdp2_tp2="right"),
    *across("AnyOfFeatures", tp2="wrong", fsdp2="wrong"),
    *across("SoftFeatures", tp2="wrong"),
    *across("NormedFeatures", tp2="wrong", fsdp2_tp2="wrong"),
    *across("SortedFeatures", tp2="wrong"),
    *across("TopFeatures", tp2="wrong"),
    *across("Maxout", tp2="right"),
    *across("FarPairs", tp2="wrong"),
    *across("GroupNormed", tp2="right", fsdp2_tp2="right"),
    *across("CountedGroups", tp2="wrong"),
    *across("RolledFeatures", tp2="wrong"),
    *across("Scaled", tp2="wrong"),
    *across("CumulatedFeatures", tp2="wrong"),
    *across("Wavy", tp2="wrong"),
    *across("Dotted", tp2="wrong"),
    *cases(
        model("FarPairs"),
        "packed",
        changed(
            PAIR,
            ("up: colwise", "up: {style: colwise, packed: [1, 1]}"),
            ("down: rowwise", "down: {style: rowwise, packed: [1, 1]}"),
        ),
        tp2="right",
    ),
    *cases(
        model("SoftFeatures"),
        "gathered",
        changed(
            PAIR,
            ("up: colwise", "up: {style: colwise, output: replicate}"),
            ("down: rowwise", "down: {style: rowwise, input: replicate}"),
        ),
        tp2="right",
    ),
    *cases(
        model("SortedFeatures"),
        "gathered",
        changed(
            PAIR,
            ("up: colwise", "up: {style: colwise, output: replicate}"),
            ("down: rowwise", "down: {style: rowwise, input: replicate}"),
        ),
        tp2="right",
    ),
    *cases(
        model("Scaled"),
        "width divided for a whole one",
        changed(
            PAIR,
            ("  blocks.*.up: colwise", "  blocks.*.up: {style: colwise, output: replicate}"),
            ("down: rowwise", "down: {style: rowwise, input: replicate}"),
        ),
        tp2="right",
    ),
    *cases(
        model("RmsFeatures"),
        "weight split",
        WEIGHTED,
        why="the mean of squares of half the features",
        tp2="wrong",
    ),
    *cases(model("RmsFeatures"), "weight whole", PAIR, tp2="fails"),
    *cases(
        model("QkNormed"),
        "norm of a rank's heads",
        OVER,
        why="the mean of squares of a rank's heads",
        tp2="fails",
        fsdp2_tp2="fails",
    ),
    *cases(model("QkNormed"), "norms whole", HEADS, tp2="fails"),
    *cases(model("QkNormed"), "gathered for the norms", GATHERED, tp2="right"),
    *cases(model("EachHeadNormed"), "norms summed", EACH, tp2="right", fsdp2_tp2="right"),
    *cases(model("EachHeadNormed"), "norms not summed", HEADS, tp2="wrong"),
    *cases(
        model("Mlp"),
        "unused tp",
        "rules:\n" + EVERYWHERE,
        why="every rank of tp computes the same",
        fsdp2_tp2="right",
    ),
    *cases(
        model("Mlp"),
        "unused cp",
        "rules:\n" + EVERYWHERE,
        why="every rank of cp computes the same, and counts",
        cp2="right",
    ),
]
