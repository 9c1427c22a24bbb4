"""`replicate_kv`: fewer key-value heads than ranks, each head on a group of ranks.

With K heads on T ranks, every T/K neighbouring ranks have the same head. Every rank stores the whole
parameter, and forward uses the rows of its rank's head. So the gradient of a rank is that of one head, zero
elsewhere. The sum over the axis, as for every replicated parameter, is the sum inside each group: exact,
equal on all ranks, and counted once in the norm. Each rank stores the whole of a weight that is small, K/H of
the queries'.
"""

from __future__ import annotations

from collections.abc import Mapping

from parallelizer.language.plan import REPLICATE, Flow, shard
from parallelizer.styles.attributes import nearest_number, read
from parallelizer.styles.feature_dims import feature_dims, is_conv1d
from parallelizer.styles.layouts import Layouts, arrivals
from parallelizer.styles.placed_parameters import ShardParams
from parallelizer.styles.target import Sharding, StyleError, Target, forward_names, named_inputs

NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
"""What the number of key-value heads is called, in a module or in its `config`; others are written out."""


SIZES = ("head_dim", "head_size")
"""What the size of a head is called, where nothing tells their number."""


def replicas(target: Target) -> int:
    """How many ranks share a key-value head: 1 where there is one for each, or no `replicate_kv` says otherwise.

    Raises StyleError where the number of heads is not to be found, or is neither a multiple nor a divisor.
    """
    written = target.options.get("replicate_kv")
    if target.options.get("divide_groups") and not written:
        raise StyleError(
            "missing-option",
            f"{target.path} has `divide_groups`, but the rule does not replicate heads",
            "write `replicate_kv: true` beside `divide_groups`",
            "divide_groups",
        )
    if not written:
        return 1
    heads, ranks = kv_heads(target, written), target.degree
    if heads % ranks and ranks % heads:
        legal = [n for n in range(1, heads + 1) if heads % n == 0]
        raise StyleError(
            "heads-not-divisible",
            f"{target.path} has {heads} key-value heads, which cannot be distributed over {target.axis}={ranks}",
            f"{target.axis} can be {', '.join(map(str, legal))}, or a multiple of {heads}, where heads are replicated",
            "replicate_kv",
        )
    return max(1, ranks // heads)


def kv_heads(target: Target, written: bool | str) -> int:
    """The number of key-value heads: of the name written, or of the usual ones, on the module or one around it."""
    names = [written] if isinstance(written, str) else [*NAMES, *(f"config.{name}" for name in NAMES)]
    found = (nearest_number((target.module, *target.around), name) for name in names)
    heads = next((n for n in found if n), None) or (_by_size(target) if written is True else None)
    if heads is None:
        called = f" called {written!r}" if isinstance(written, str) else ""
        raise StyleError(
            "unknown-attribute",
            f"{target.path} has no number of key-value heads{called}, and neither has a module around it",
            "name the attribute, as in `replicate_kv: config.num_key_value_heads`",
            "replicate_kv",
        )
    return heads


def _by_size(target: Target) -> int | None:
    """How many heads a projection makes, where only the size of one is known."""
    dims = feature_dims(target.module)
    size = next((n for name in SIZES if (n := nearest_number((target.module, *target.around), name))), None)
    if dims is None or size is None:
        return None
    features = target.module.get_parameter("weight").shape[dims.outputs]
    return features // size if features % size == 0 else None


def replicated(target: Target, dims: Mapping[str, int], flow_in: Flow) -> Sharding:
    """colwise with heads for fewer ranks than there are: see the module's first lines."""
    if target.options.get("packed") or target.options.get("divide"):
        option = "packed" if target.options.get("packed") else "divide"
        raise StyleError(
            "wrong-layout",
            f"{target.path} replicates key-value heads, so `{option}` cannot be used with `replicate_kv`",
            "use `replicate_kv` only for the projections of keys and values",
            option,
        )
    flow: Flow | None = next(iter((target.options.get("output") or {}).values()), None)
    if target.options.get("local") is False or (flow is not None and flow.wanted != shard(-1)):
        raise StyleError(
            "wrong-layout",
            f"the replicated heads of {target.path} are not shards of one tensor, so they have no placement",
            "remove `output` and `local`: each rank returns its head as a plain tensor",
            "local" if target.options.get("local") is False else "output",
        )
    heads = kv_heads(target, target.options["replicate_kv"])
    own = dict(target.module.named_parameters(recurse=False))
    dims = {name: dim for name, dim in dims.items() if name in own}
    for name, dim in dims.items():
        if own[name].shape[dim] % heads:
            raise StyleError(
                "not-divisible",
                f"dimension {dim} of {target.path}.{name} is {own[name].shape[dim]:,}, which {heads} heads do not divide",
                "set `replicate_kv` to the number of heads of this projection",
                "replicate_kv",
            )
    params = {name: {target.axis: REPLICATE} for name in dims}
    name = next(iter(named_inputs(target)), None) or (forward_names(target.module) or ("",))[0]
    layouts = Layouts({name: flow_in}, {}, local_input=True, partial_gradients=True)
    # Conv1D's forward reads how many features come out.
    divided = {"nf": read(target.module, "nf") or 0} if is_conv1d(target.module) else {}
    style = ShardParams(
        params,
        axis=target.axis,
        divide=dict.fromkeys(divided, heads),
        layouts=layouts,
        heads=heads,
        head_dims=dims,
    )
    return Sharding(style, (target.axis,), params, divided=divided, arrives=arrivals(layouts.input))
