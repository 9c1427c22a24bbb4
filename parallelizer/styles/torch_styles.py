"""Torch's own ParallelStyles, written as plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from parallelizer.language.placement import to_torch
from parallelizer.language.plan import REPLICATE, Flow
from parallelizer.styles.application import ModuleCall
from parallelizer.styles.layouts import Layouts, makes_partial
from parallelizer.styles.own_output import OwnedRowwise
from parallelizer.styles.own_rows import RowwiseEmbedding
from parallelizer.styles.statements import Statement, dict_text, placement_text, tuple_text


def native_statement(act: ParallelStyle) -> Statement | None:
    """The call that makes one of torch's three styles; None for any other, and for a class of the user's that builds on
    them. For a class of ours that builds on RowwiseParallel it is the call of torch's class.
    """
    if type(act) is ColwiseParallel:
        return _features_statement("ColwiseParallel", act, (Replicate(), Shard(-1), True))
    if isinstance(act, RowwiseParallel) and type(act) in (RowwiseParallel, RowwiseEmbedding, OwnedRowwise):
        return _features_statement("RowwiseParallel", act, (Shard(-1), Replicate(), True))
    if type(act) is SequenceParallel:
        (sharding,) = act.sequence_sharding
        dim = () if sharding.dim == 1 else (f"sequence_dim={sharding.dim}",)
        local = ("use_local_output=True",) if act.use_local_output else ()
        return Statement("SequenceParallel", (*dim, *local), parallel_style=True)
    return None


def _features_statement(
    name: str, act: ColwiseParallel | RowwiseParallel, defaults: tuple[Any, ...]
) -> Statement:
    (arrives,), (leaves,) = act.input_layouts, act.output_layouts
    given = zip(
        ("input_layouts", "output_layouts", "use_local_output"),
        (arrives, leaves, act.use_local_output),
        defaults,
        strict=True,
    )
    arguments = tuple(f"{k}={placement_text(v)}" for k, v, default in given if v != default)
    return Statement(name, arguments, parallel_style=True)


def prepare_statement(layouts: Layouts, call: ModuleCall | None) -> Statement | None:
    """PrepareModuleInput or a relative, which want every argument of a call spelled out; None where they cannot do it."""
    if call is None or layouts.partial_gradients or layouts.partial_output_gradients or layouts.float8:
        return None
    if any(map(makes_partial, layouts.input.values())):
        return None
    arguments: list[str] = []
    if layouts.input:
        tensors = {**dict(call.positional), **call.keywords}
        if not all(tensors.get(name) for name in layouts.input):
            return None
        by_position = [layouts.input.get(name) for name, _ in call.positional]
        by_keyword = {k: f for k in call.keywords if (f := layouts.input.get(k)) is not None}
        if any(by_position):
            arguments += _pairs("input_layouts", "desired_input_layouts", by_position)
        if by_keyword:
            for key, side in (("input_kwarg_layouts", _arrives), ("desired_input_kwarg_layouts", _wanted)):
                arguments.append(
                    f"{key}={dict_text({k: placement_text(side(f)) for k, f in by_keyword.items()})}"
                )
        if layouts.local_input:
            arguments.append("use_local_input=True" if layouts.output else "use_local_output=True")
    if layouts.output:
        keys = {int(key or 0) if (key or "0").isdigit() else -1 for key in layouts.output}
        length = 1 if call.outputs is None else call.outputs
        if call.outputs == 1 or not all(0 <= key < length for key in keys):
            return None
        flows = {int(key or 0): flow for key, flow in layouts.output.items()}
        arguments += _pairs("output_layouts", "desired_output_layouts", [flows.get(i) for i in range(length)])
        if not layouts.local_output:
            arguments.append("use_local_output=False")
    name = (
        "PrepareModuleInputOutput"
        if layouts.input and layouts.output
        else "PrepareModule" + ("Input" if layouts.input else "Output")
    )
    return Statement(name, tuple(arguments), parallel_style=True)


def _pairs(first: str, second: str, flows: Sequence[Flow | None]) -> list[str]:
    """Both sides of flows, as one placement or as a tuple with None where nothing is said."""
    return [
        f"{key}={tuple_text(['None' if f is None else placement_text(side(f)) for f in flows])}"
        for key, side in ((first, _arrives), (second, _wanted))
    ]


def _arrives(flow: Flow) -> TorchPlacement:
    return to_torch(flow.arrives or REPLICATE)


def _wanted(flow: Flow) -> TorchPlacement:
    return to_torch(flow.wanted or flow.arrives or REPLICATE)
