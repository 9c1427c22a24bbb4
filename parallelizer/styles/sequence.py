"""`sequence`: a module that runs on its rank's part of the sequence, with replicated parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.language.plan import REPLICATE, shard
from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.options import AXIS, LOCAL
from parallelizer.styles.registry import implements
from parallelizer.styles.target import Sharding, StyleError

if TYPE_CHECKING:
    from parallelizer.styles.target import Target

declare(
    StyleDeclaration(
        "sequence",
        "params",
        "tp",
        "run on the sharded sequence with replicated parameters",
        {
            "layout": OptionKind("placement", "the placement of the sequence: shard(1) by default"),
            "local": LOCAL,
            "axis": AXIS,
        },
        defaults={"layout": "shard(1)", "local": "false"},
    )
)


@implements("sequence")
def sequence(target: Target) -> Sharding:
    """Runs on its rank's part of the sequence; parameters replicated, their gradients partial until reduced.

    With the layout `replicate` every rank runs on everything, and computes the same gradient.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import SequenceParallel

    from parallelizer.styles.placed_parameters import ShardParams

    layout = target.options.get("layout") or shard(1)
    params = {n: {target.axis: REPLICATE} for n, _ in target.module.named_parameters(recurse=False)}
    if any(True for child in target.module.children() for _ in child.parameters()):
        raise StyleError(
            "style-module",
            f"{target.path or 'the root'} ({type(target.module).__name__}) has modules with parameters inside",
            "write the rule for those modules",
        )
    if layout.kind == "replicate":
        return Sharding(ShardParams(params, axis=target.axis, gradients=Replicate), (target.axis,), params)
    if layout.kind != "shard" or layout.dim is None:
        raise StyleError(
            "unknown-placement",
            f"sequence cannot run on {layout}",
            "shard(1) or replicate",
            "layout",
            layout.span,
        )
    local = target.options.get("local")
    style = SequenceParallel(sequence_dim=layout.dim, use_local_output=False if local is None else local)
    return Sharding(style, (target.axis,), params, arrives={"": layout})
