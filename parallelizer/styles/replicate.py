"""`replicate`: replicated DTensor parameters inside a sharded region."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.language.plan import REPLICATE, full_name
from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.options import AXIS
from parallelizer.styles.registry import implements
from parallelizer.styles.target import Sharding, StyleError

if TYPE_CHECKING:
    from parallelizer.styles.target import Target

declare(
    StyleDeclaration(
        "replicate",
        "params",
        "tp",
        "replicated parameters inside a sharded region",
        {
            "grad": OptionKind(
                "choice",
                "partial sums the gradients over the axis; replicate does not",
                ("partial", "replicate"),
            ),
            "value": OptionKind(
                "choice",
                "partial: forward reads the value divided by the number of ranks, so that a sum over the axis adds it once, and "
                "every rank has the gradient of the sum; replicate: the value",
                ("partial", "replicate"),
            ),
            "axis": AXIS,
        },
        takes_parameters=True,
        defaults={"grad": "partial", "value": "replicate"},
    )
)


@implements("replicate")
def replicate(target: Target) -> Sharding:
    """Parameters as replicated DTensors, forward on plain tensors; `grad` says whether gradients are summed
    over the axis, `value` whether forward reads a rank's term of the value.
    """
    from torch.distributed.tensor import Partial, Replicate

    from parallelizer.styles.placed_parameters import ShardParams

    own = [n for n, _ in target.module.named_parameters(recurse=False)]
    if target.param is not None and target.param not in own:
        raise StyleError(
            "style-on-parameter",
            f"{full_name(target.path, target.param)} is a buffer, but `replicate` is for parameters",
            "remove the rule: buffers are replicated unless shard-params shards them",
        )
    names = [target.param] if target.param else own
    if not names:
        raise StyleError(
            "style-module",
            f"{target.path or 'the root'} ({type(target.module).__name__}) has no parameters of its own",
            "write the rule for modules that have parameters",
        )
    params = {n: {target.axis: REPLICATE} for n in names}
    partial = target.options.get("value") == "partial"  # of a sum, whose gradient every rank has
    gradients = Replicate if partial or target.options.get("grad") == "replicate" else Partial
    terms = target.degree if partial else 1
    style = ShardParams(params, axis=target.axis, gradients=gradients, terms=terms)
    return Sharding(style, (target.axis,), params)
