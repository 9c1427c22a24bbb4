"""Models of rows over data axes: the plan is trivial, and it is the forward that is right or not."""

from tests.silent.case import CLASSES, EVERYWHERE, TOKENS, Model, cases, changed

FEATURES = {"features": {"shape": ["batch", 12], "dtype": "float32"}}
CLASSIFIED = "parallelizer.losses.classification"


def model(name: str) -> Model:
    words = name in ("Trimmed", "Longest")
    return Model(
        f"rows.{name}",
        f"tests.silent.models.rows.{name}",
        (TOKENS if words else FEATURES) | CLASSES,
        CLASSIFIED,
        change=shorter if words else None,
    )


def shorter(batch, generator):
    """Ends of rows are padding; the rows of the first half are longer."""
    ids = batch["input_ids"]
    for row in range(len(ids)):
        ids[row, 15 - row :] = 0


SPLIT = """\
  first: colwise
  second: {style: rowwise}
  "": fsdp
"""

CASES = [
    *cases(model("Plain"), "plain", EVERYWHERE, fsdp2="right"),
    *cases(model("Normed"), "batch norm", EVERYWHERE, fsdp2="wrong", hsdp2x2="wrong"),
    *cases(model("LayerNormed"), "layer norm", EVERYWHERE, fsdp2="right"),
    *cases(model("GloballyNormed"), "statistics of all ranks", EVERYWHERE, fsdp2="right", hsdp2x2="right"),
    *cases(model("Centred"), "mean over the batch", EVERYWHERE, fsdp2="wrong"),
    *cases(model("SelfCentred"), "mean over features", EVERYWHERE, fsdp2="right"),
    *cases(model("Quantised"), "largest of the batch", EVERYWHERE, fsdp2="wrong"),
    *cases(model("RowQuantised"), "largest of a row", EVERYWHERE, fsdp2="right"),
    *cases(model("Mixed"), "the row before", EVERYWHERE, fsdp2="wrong", hsdp2x2="wrong"),
    *cases(model("Neighbours"), "attention over rows", EVERYWHERE, fsdp2="wrong"),
    *cases(model("Limited"), "norm of the batch", EVERYWHERE, fsdp2="wrong"),
    *cases(model("RowLimited"), "norms of rows", EVERYWHERE, fsdp2="right"),
    *cases(model("AnyLarge"), "any() of the batch", EVERYWHERE, fsdp2="wrong"),
    *cases(model("AnyIsSame"), "any() that only saves work", EVERYWHERE, fsdp2="right"),
    *cases(model("Followed"), "running mean", EVERYWHERE, fsdp2="wrong", hsdp2x2="wrong"),
    *cases(model("FollowedTogether"), "running mean of all ranks", EVERYWHERE, fsdp2="right"),
    *cases(model("Ordered"), "places among rows", EVERYWHERE, fsdp2="wrong"),
    *cases(model("SortedAndBack"), "sorted and put back", EVERYWHERE, fsdp2="right"),
    *cases(model("Counted"), "number of rows", EVERYWHERE, fsdp2="wrong"),
    *cases(model("OneByOne"), "a loop over rows", EVERYWHERE, fsdp2="right"),
    *cases(model("Picked"), "a boolean index", EVERYWHERE, fsdp2="right"),
    *cases(model("Reference"), "relative to row 0", EVERYWHERE, fsdp2="wrong"),
    *cases(model("TopRows"), "the largest rows", EVERYWHERE, fsdp2="wrong"),
    *cases(model("Standardised"), "standardised inputs", EVERYWHERE, fsdp2="wrong"),
    *cases(model("Whitened"), "deviation without gradient", EVERYWHERE, fsdp2="wrong"),
    *cases(model("Unused"), "a layer that takes no part", EVERYWHERE, fsdp2="right"),
    *cases(model("Frozen"), "a frozen layer", EVERYWHERE, fsdp2="right"),
    *cases(model("Twice"), "a layer used twice", EVERYWHERE, fsdp2="right"),
    *cases(model("Spectral"), "spectral norm", EVERYWHERE, fsdp2="right", hsdp2x2="right"),
    *cases(model("WeightNormed"), "weight norm", EVERYWHERE, fsdp2="right"),
    *cases(model("Codebook"), "codes that follow", EVERYWHERE, fsdp2="wrong"),
    *cases(model("Capacity"), "a limit of rows", EVERYWHERE, fsdp2="wrong"),
    *cases(model("Dropless"), "experts without a limit", EVERYWHERE, fsdp2="right"),
    *cases(model("Trimmed"), "trimmed to the longest row", EVERYWHERE, fsdp2="right"),
    *cases(model("Longest"), "mean over the longest row", EVERYWHERE, fsdp2="wrong"),
    *cases(model("Plain"), "pair", SPLIT, tp2="right", fsdp2_tp2="right"),
    *cases(
        model("Normed"),
        "batch norm of replicated rows",
        EVERYWHERE,
        why="tp has no rule: every rank has all rows",
        tp2="right",
    ),
    *cases(
        model("Normed"),
        "batch norm between",
        "  first: {style: colwise, output: replicate}\n  second: {style: colwise, output: replicate}\n",
        tp2="right",
    ),
    *cases(
        model("Normed"),
        "batch norm of a rank's features",
        SPLIT,
        why="the norm has all features, and a rank has half",
        tp2="fails",
    ),
    *cases(
        model("SelfCentred"),
        "mean over a rank's features",
        SPLIT,
        why="the mean of half the features",
        tp2="wrong",
    ),
    *cases(model("RowLimited"), "norms of a rank's features", SPLIT, tp2="wrong"),
    *cases(model("Limited"), "norm of a rank's features", SPLIT, tp2="wrong"),
    *cases(model("Whitened"), "deviation of a rank's features", SPLIT, tp2="wrong"),
    *cases(
        model("Centred"),
        "mean over the batch, of features of their own",
        SPLIT,
        why="each feature has its own mean",
        tp2="right",
    ),
    *cases(model("Followed"), "running mean of all features", SPLIT, why="the buffer is whole", tp2="fails"),
    *cases(model("Twice"), "a rowwise layer fed whole the second time", SPLIT, tp2="fails"),
    *cases(model("AnyLarge"), "any() of a rank's features", SPLIT, tp2="wrong"),
    *cases(
        model("AnyLarge"),
        "any() of whole features",
        changed(
            SPLIT,
            ("first: colwise", "first: {style: colwise, output: replicate}"),
            ("{style: rowwise}", "{style: colwise, output: replicate}"),
        ),
        tp2="right",
    ),
    *cases(
        model("Spectral"),
        "spectral norm of a split weight",
        SPLIT,
        why="the weight is made anew of a split one",
        tp2="fails",
    ),
    *cases(model("WeightNormed"), "weight norm of a split weight", SPLIT, tp2="fails"),
    *cases(model("Dropless"), "experts on a rank's features", SPLIT, tp2="fails"),
]
