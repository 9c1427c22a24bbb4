"""The common part of prepare-input, prepare-output and prepare-io: placements of the inputs and outputs of a
module.
"""

from __future__ import annotations

from collections.abc import Mapping

from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.language.plan import REPLICATE, Flow
from parallelizer.styles.attributes import nearest_number, numbers
from parallelizer.styles.context_parallel.split_sequence import SplitSequence
from parallelizer.styles.layouts import Layouts, PrepareIO, arrivals, makes_partial
from parallelizer.styles.target import Sharding, StyleError, Target, named_inputs


def prepare(target: Target, *, inputs: bool, outputs: bool) -> Sharding:
    """The inputs, the outputs, or both laid out anew as the options say. Raises StyleError."""
    options = target.options
    local = options.get("local")
    partial = options.get("grad") == "partial"
    layouts = Layouts(
        input=named_inputs(target) if inputs else {},
        output=options.get("output") or {} if outputs else {},
        local_input=bool(options.get("local_input", local if not outputs else False)),
        local_output=True if local is None else local,
        partial_gradients=partial and inputs,
        partial_output_gradients=partial and not inputs,
        last=_last(target),
        float8=options.get("cast") == "float8",
    )
    missing = [o for o, on in (("input", inputs), ("output", outputs)) if on and not getattr(layouts, o)]
    if len(missing) == inputs + outputs:
        raise StyleError(
            "missing-option",
            f"the rule has no {' or '.join(missing)}",
            f"write {missing[0]}: {{x: shard(1) -> replicate}}",
        )
    check_flows(target, layouts.input, "input", terms=layouts.local_input)
    check_flows(target, layouts.output, "output")
    if layouts.partial_output_gradients:
        _check_summed(layouts)
    if layouts.float8:
        _check_cast(target, layouts)
    if target.axis == "cp":
        _check_split(layouts.input, "input")
        _check_split(layouts.output, "output")
        return Sharding(SplitSequence(layouts), ("cp",))
    return Sharding(PrepareIO(layouts, target.axis), (target.axis,), arrives=arrivals(layouts.input))


def check_flows(target: Target, flows: Mapping[str, Flow], option: str, terms: bool = False) -> None:
    """Refuse what a redistribution cannot do: making something partial out of what is not, but for `terms`, which are
    plain tensors. Raises StyleError.
    """
    for flow in flows.values():
        if terms and makes_partial(flow):
            continue
        if (
            flow.wanted is not None
            and flow.wanted.kind == "partial"
            and (flow.arrives is None or flow.arrives.kind != "partial")
        ):
            raise StyleError(
                "unknown-placement",
                f"`{flow}` asks for a partial tensor",
                "write partial before the arrow only",
                option,
                flow.wanted.span,
            )


def _last(target: Target) -> int | None:
    """How many of the last features `grad` is of; None for all. Raises StyleError."""
    written = target.options.get("grad_last")
    if not isinstance(written, str):
        return written
    modules = (target.module, *target.around)
    value = nearest_number(modules, written)
    if value is None or value < 1:
        known = list(dict.fromkeys(n for m in modules[:2] for n in numbers(m)))
        raise StyleError(
            "unknown-attribute",
            f"neither {target.path} nor a module around it has a positive whole number {written!r}",
            did_you_mean(written, known, "there are"),
            "grad_last",
        )
    return value


def _check_summed(layouts: Layouts) -> None:
    """`grad: partial` is of an output that every rank holds whole and hands on as a plain tensor. Raises StyleError."""
    for flow in layouts.output.values():
        if flow.wanted is None or flow.wanted.kind != "replicate" or not layouts.local_output:
            raise StyleError(
                "wrong-layout",
                f"`grad: partial` needs an output that is whole and a plain tensor, not `{flow}`",
                "write `output: replicate` without `local: false`, or remove `grad`",
                "grad",
            )


def _check_cast(target: Target, layouts: Layouts) -> None:
    """What is cast to float8 is gathered, and handed on as a DTensor. Raises StyleError."""
    still = [
        f for f in layouts.input.values() if (f.arrives or REPLICATE).kind != "shard" or f.wanted != REPLICATE
    ]
    if target.axis == "cp" or layouts.local_input or still:
        what = (
            "over cp, where ranks exchange keys and values, and no tensor in float8"
            if target.axis == "cp"
            else "with `local: true`, since a linear could not tell the scale of a plain tensor"
            if layouts.local_input
            else f"for `{still[0]}`, which gathers nothing"
        )
        raise StyleError("precision-cast", f"nothing can be cast to float8 {what}", "remove `cast`", "cast")


def _check_split(flows: Mapping[str, Flow], option: str) -> None:
    """Over cp a plain tensor is split or gathered, and nothing in it tells how it lies. Raises StyleError."""
    for flow in flows.values():
        kinds = {p.kind for p in (flow.arrives, flow.wanted) if p is not None}
        if kinds != {"replicate", "shard"}:
            raise StyleError(
                "wrong-layout",
                f"`{flow}` neither splits nor gathers the sequence over cp",
                "write shard(1) -> replicate, or replicate -> shard(1)",
                option,
                next((p.span for p in (flow.arrives, flow.wanted) if p is not None), None),
            )
