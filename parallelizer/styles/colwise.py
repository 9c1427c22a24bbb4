"""`colwise`: the outputs of a linear, or the columns of an embedding, split over an axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.language.plan import REPLICATE, shard
from parallelizer.language.styles import StyleDeclaration, declare
from parallelizer.styles.options import LINEAR, REPLICATE_KV
from parallelizer.styles.registry import implements

if TYPE_CHECKING:
    from parallelizer.styles.target import Sharding, Target

declare(
    StyleDeclaration(
        "colwise",
        "params",
        "tp",
        "split a linear's outputs or an embedding's columns",
        {**LINEAR, "replicate_kv": REPLICATE_KV},
        defaults={"input": "replicate", "output": "shard(-1)", "local": "true"},
    )
)


@implements("colwise")
def colwise(target: Target) -> Sharding:
    """A linear's weight and bias sharded by output feature, an embedding's weight by column."""
    from torch.distributed.tensor.parallel import ColwiseParallel

    from parallelizer.styles.kv_heads import replicas, replicated
    from parallelizer.styles.linears import known_feature_dims, linear, one_input, one_output

    dims = {"weight": known_feature_dims(target).outputs, "bias": 0}
    arrives, leaves = one_input(target, REPLICATE), one_output(target, shard(-1))
    if replicas(target) > 1:
        return replicated(target, dims, arrives)
    return linear(target, dims, arrives, leaves, ColwiseParallel)
