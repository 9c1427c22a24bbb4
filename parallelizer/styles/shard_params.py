"""`shard-params`: any module, any parameter, any dimension, several axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.options import LINEAR, PARTS, REPLICATE_KV
from parallelizer.styles.registry import implements
from parallelizer.styles.target import StyleError, named_inputs

if TYPE_CHECKING:
    from parallelizer.styles.target import Sharding, Target

declare(
    StyleDeclaration(
        "shard-params",
        "params",
        "tp",
        "any module, any parameter, any dimension, several axes; or `divide` alone, on a module without parameters",
        {
            "params": OptionKind(
                "params", "a placement, or placements by axis, for each parameter or buffer"
            ),
            **LINEAR,
            "packed": OptionKind("parts-by-param", f"{PARTS}; or a map of parts by parameter"),
            "replicate_kv": REPLICATE_KV,
            "divide_groups": OptionKind(
                "names",
                "numbers of query heads for each key-value head, divided by the number of ranks that share a head",
            ),
        },
        takes_parameters=True,
        defaults={"local": "true"},
    )
)


@implements("shard-params")
def shard_params(target: Target) -> Sharding:
    """Parameters placed as written, and buffers seen so; `input` and `output` lay tensors out as for the prepare
    styles.
    """
    from parallelizer.styles.sharding import layouts_of, sharding_of
    from parallelizer.styles.sizes import on_axes

    written = target.options.get("params") or {}
    if target.param is not None:
        if set(written) != {""}:
            raise StyleError(
                "wrong-type",
                "the glob matches a parameter, but `params` names others",
                "write params: shard(0), or match the module",
                "params",
            )
        written = {target.param: written[""]}
    elif "" in written:
        raise StyleError(
            "wrong-type",
            "`params` names no parameter",
            "write params: {weight: shard(0)}",
            "params",
        )
    params = {name: on_axes(target, name, by_axis) for name, by_axis in written.items()}
    layouts = layouts_of(target, named_inputs(target), target.options.get("output") or {})
    return sharding_of(target, params, layouts)
