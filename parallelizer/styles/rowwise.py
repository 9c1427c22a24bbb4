"""`rowwise`: the inputs of a linear, or the rows of an embedding, split over an axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.language.plan import REPLICATE, shard
from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.options import LINEAR
from parallelizer.styles.registry import implements

if TYPE_CHECKING:
    from parallelizer.styles.target import Sharding, Target

declare(
    StyleDeclaration(
        "rowwise",
        "params",
        "tp",
        "split a linear's inputs or an embedding's rows",
        {
            **LINEAR,
            "own": OptionKind(
                "bool", "the output is a copy, which the forward may change in place (`out += ...`)"
            ),
        },
        defaults={"input": "shard(-1), replicate for an embedding", "output": "replicate", "local": "true"},
    )
)


@implements("rowwise")
def rowwise(target: Target) -> Sharding:
    """A linear's weight sharded by input feature (its bias whole, added once), an embedding's by row."""
    from torch.distributed.tensor.parallel import RowwiseParallel

    from parallelizer.styles.linears import known_feature_dims, linear, one_input, one_output
    from parallelizer.styles.own_output import OwnedRowwise
    from parallelizer.styles.own_rows import RowwiseEmbedding
    from parallelizer.styles.target import StyleError

    features = known_feature_dims(target)
    dims = {"weight": features.inputs, "bias": None}
    arrives = one_input(target, REPLICATE if features.rows else shard(-1))
    owned = bool(target.options.get("own"))
    torch_class = RowwiseEmbedding if features.rows else OwnedRowwise if owned else RowwiseParallel
    sharding = linear(target, dims, arrives, one_output(target, REPLICATE), torch_class)
    if owned and not isinstance(sharding.style, OwnedRowwise):
        raise StyleError(
            "wrong-type",
            f"`own` is for a linear without `packed` and `divide`, which {target.path} is not",
            "remove own",
            "own",
        )
    return sharding
