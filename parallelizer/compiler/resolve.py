"""From winning rules to applications: fills in options and layouts, asks each style for its effect, and
determines FSDP's units.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer.compiler.compilation import Compilation
from parallelizer.diagnostics.diagnostic import Diagnostic, Related, Span
from parallelizer.language.layout_names import unknown_layout
from parallelizer.language.pipeline.stages import Stages
from parallelizer.language.plan import (
    AXES,
    EXPERT,
    EXPERT_SHARDS,
    REPLICATE,
    SLOTS,
    TENSOR_AXES,
    Flow,
    Option,
    Placement,
    Rule,
    StyleDefaults,
    StyleUse,
    folded_name,
    full_name,
)
from parallelizer.language.styles import STYLES
from parallelizer.styles import fsdp
from parallelizer.styles.application import Application, Slot, tensor_placements
from parallelizer.styles.registry import FUNCTIONS
from parallelizer.styles.sizes import dividing, own_tensors
from parallelizer.styles.target import Sharding, StyleError, Target

AXES_OF_SLOT = {
    "params": TENSOR_AXES,
    "io": ("cp", *TENSOR_AXES),
    "random": TENSOR_AXES,
    "attention": ("cp",),
    "experts": (EXPERT,),
    "stage": ("pp",),
}
"""The axes that styles of a slot may stand on."""


@dataclass(frozen=True)
class Winner:
    """One style on one module, its options filled in from the preset."""

    path: str
    slot: Slot
    rule: Rule
    use: StyleUse
    written: Mapping[str, Option]

    @property
    def options(self) -> dict[str, Any]:
        return {name: option.value for name, option in self.written.items()}


def resolve(state: Compilation) -> None:
    """Every application but fsdp's. What is wrong in the same way on several modules is reported once."""
    failures: dict[tuple[Any, ...], list[tuple[StyleError, Diagnostic]]] = {}
    for winner in _winners(state):
        slot, use = winner.slot[0], winner.use
        if slot == "fsdp":
            continue
        options = {k: _resolved(v, state, use) for k, v in winner.options.items()}
        if use.style == "replicate" and state.mesh.ep > 1 and _inside_of_experts(state, winner.path):
            options["grad"] = (
                "partial"  # each rank has other rows there, also where the plan without ep has the same
            )
        axis = options.get("axis") or STYLES[use.style].axis
        application = Application(
            winner.path,
            slot,
            use.style,
            (),
            winner.rule,
            options,
            {k: o.span for k, o in winner.written.items()},
        )
        try:
            if axis is not None:
                application = _on_axis(state, application, axis, winner.slot[1] if slot == "params" else None)
            elif use.style in FUNCTIONS:  # what uses no axis has checks only
                checked = FUNCTIONS[use.style](_target(state, application, None, ""))
                stacked = checked.stacked if isinstance(checked, Sharding) else ()
                application = dataclasses.replace(application, stacked=stacked)
        except StyleError as error:
            key = (error.code, winner.rule.span, error.option)
            failures.setdefault(key, []).append((error, _failure(state, error, winner, axis)))
            continue
        if application.axes or axis is None:
            state.applications.append(application)
    state.diagnostics += _reported(list(failures.values()), _sharded_sizes(state) if failures else {})


def _sharded_sizes(state: Compilation) -> dict[str, list[int]]:
    """The sizes of parameters' dimensions that one axis alone shards, under every name of a tied one."""
    sizes: dict[str, list[int]] = {}
    for application in state.applications:
        own = own_tensors(state.modules[application.module])
        for name, by_axis in application.params.items():
            for axis, placement in by_axis.items():
                alone = [p.dim for p in by_axis.values()].count(placement.dim) == 1
                if placement.dim is not None and alone and name in own:  # experts may be stacked later
                    sizes.setdefault(axis, []).append(own[name].shape[placement.dim])
    return sizes


def _reported(
    failures: Sequence[Sequence[tuple[StyleError, Diagnostic]]], sizes: dict[str, list[int]]
) -> Iterator[Diagnostic]:
    """One diagnostic for those that are alike. The sizes proposed for an axis divide every size that this axis failed to divide,
    and `sizes`.
    """
    for error, _ in itertools.chain.from_iterable(failures):
        if error.divided is not None:
            sizes.setdefault(error.divided[0], []).extend(error.divided[1])
    for (error, first), *others in failures:
        message = f"{first.message} ({len(others)} more like it)" if others else first.message
        help_text = first.help
        if error.divided is not None:
            axis, own = error.divided
            help_text = dividing(axis, (*own, *sizes[axis]))
        yield dataclasses.replace(first, message=message, help=help_text)


def _inside_of_experts(state: Compilation, path: str) -> bool:
    """Whether a module is one that experts around it leave whole."""
    segments = path.split(".")
    for at in range(1, len(segments)):
        around, inner = ".".join(segments[:at]), ".".join(segments[at:])
        _, use = state.winners.get(around, {}).get(("experts", None), (None, None))
        whole = use.options.get("whole") if use is not None else None
        if whole is not None and any(inner == one or inner.startswith(f"{one}.") for one in whole.value):
            return True
    return False


def _on_axis(state: Compilation, application: Application, axis: str, param: str | None) -> Application:
    """The application on the axes above 1 that its style stands on; none where there is nothing to do. Raises
    StyleError.
    """
    possible = AXES_OF_SLOT.get(application.slot, AXES)
    if axis not in possible:
        raise StyleError(
            "unknown-axis",
            f"{application.style} does not use {axis}",
            f"it uses {' or '.join(possible)}",
            "axis",
        )
    act: ParallelStyle | None = None
    axes: tuple[str, ...] = (axis,)
    more: dict[str, Any] = {}
    if application.style in FUNCTIONS:
        result = FUNCTIONS[application.style](_target(state, application, param, axis))
        sharding = Sharding(result, (axis,)) if isinstance(result, ParallelStyle) else result
        act, axes = sharding.style, sharding.axes
        more = {
            "params": sharding.params,
            "buffers": sharding.buffers,
            "packed": sharding.packed,
            "divided": sharding.divided,
            "arrives": sharding.arrives,
        }
    above = tuple(a for a in axes if state.mesh.size_of(a) > 1)
    return dataclasses.replace(application, axes=above, axis=axis, act=act, **more)


def _target(state: Compilation, application: Application, param: str | None, axis: str) -> Target:
    path, options = application.module, {**application.options, "style": application.style}
    sizes = {**state.mesh.sizes, EXPERT: state.mesh.ep}
    return Target(state.modules[path], path, param, options, axis, sizes, _around(state, path))


def _around(state: Compilation, path: str) -> tuple[nn.Module, ...]:
    """The modules that one lies in, from the inside out."""
    segments = path.split(".") if path else []
    return tuple(state.modules[".".join(segments[:n])] for n in reversed(range(len(segments))))


def _winners(state: Compilation) -> Iterator[Winner]:
    """In the order of modules, then slots; io from the innermost axis out, as it is applied. Styles switched
    off are left out.
    """
    for path in state.modules:
        slots = state.winners.get(path, {})
        for slot in sorted(slots, key=slot_order):
            rule, use = slots[slot]
            defaults = state.defaults.get(use.style, StyleDefaults())
            if not defaults.off:
                yield Winner(path, slot, rule, use, {**defaults.options, **use.options})


def slot_order(slot: Slot) -> tuple[int, int, str]:
    """Orders slots as they are applied."""
    name, detail = slot
    return SLOTS.index(name), -AXES.index(detail) if name == "io" and detail else 0, detail or ""


def _failure(state: Compilation, error: StyleError, winner: Winner, axis: str | None) -> Diagnostic:
    option = winner.written.get(error.option or "")
    set_here = state.mesh.spans.get(axis or "") if error.code == "not-divisible" else None
    related = (Related(set_here, f"{axis}={state.mesh.size_of(axis or '')} is set here"),) if set_here else ()
    place = option.span if option else winner.use.span
    if isinstance(error.part, Span):
        place = error.part
    elif error.part is not None and option is not None:
        place = option.parts.get(error.part, place)
    return Diagnostic(error.code, error.message, place, error.help, related=related)


def _resolved(value: Any, state: Compilation, use: StyleUse) -> Any:
    """The value with every layout's name replaced by its placement."""
    if isinstance(value, Placement) and value.kind == "layout":
        layouts, name = state.plan.layouts, value.name or ""
        if name in layouts:
            return dataclasses.replace(layouts[name], span=value.span)
        state.diagnostics.append(unknown_layout(value, layouts, use.span))
        return dataclasses.replace(value, kind="replicate")
    if isinstance(value, Flow):
        return Flow(_resolved(value.arrives, state, use), _resolved(value.wanted, state, use))
    if isinstance(value, Mapping):
        return {k: _resolved(v, state, use) for k, v in value.items()}
    return value


def shard_data(state: Compilation) -> None:
    """What each FSDP unit gathers, and on which dimension each of its parameters is sharded."""
    winners = {winner.path: winner for winner in _winners(state) if winner.slot[0] == "fsdp"}
    if state.stages is not None:
        winners = _units_of_stages(winners, state.stages)
    tensor = tensor_placements(state.applications)
    experts = {a.module: a for a in state.applications if a.slot == "experts"}
    theirs = {full_name(a.module, name) for a in experts.values() for name in a.params}
    # Units of their own: their collectives must not wait for those of other parameters, and go over other ranks.
    for path, application in experts.items():
        around = max((p for p in winners if fsdp.is_in(path, p) or p == path), key=len, default=None)
        if around is not None:
            found = _unit(
                state, path, [full_name(path, n) for n in application.params], winners[around], tensor, True
            )
            state.applications += [found] if found else []
    options = {p: w.options for p, w in winners.items() if p not in experts}
    for path, names in fsdp.units(state.model, options, theirs).items():
        found = _unit(state, path, names, winners[path], tensor, False)
        state.applications += [found] if found else []


def _unit(
    state: Compilation,
    path: str,
    names: Sequence[str],
    winner: Winner,
    tensor: Mapping[str, Mapping[str, Placement]],
    experts: bool,
) -> Application | None:
    """One FSDP unit, over the data axes or over what `ep` leaves of a replica; None if it has nothing to do."""
    mesh, options = state.mesh, winner.options
    over = (EXPERT_SHARDS,) if experts else mesh.fsdp_axes
    shared = [a.module for a in state.applications if a.slot == "experts"]
    axes = tuple(a for a in ("dp_replicate", *over) if mesh.size_of(a) > 1)
    if not axes and not fsdp.changes_precision_or_place(options, [state.parameters[n] for n in names]):
        return None
    assign = fsdp.assign_expert if experts else fsdp.assign
    params, reasons = {}, {}
    for name in names:
        relative = name[len(path) + 1 :] if path else name
        assigned = assign(state.parameters[name], options, tensor.get(name, {}), mesh.size(*over))
        if not experts and any(fsdp.is_in(name, one) for one in shared):
            # A gather there would lie between the two ways of the tokens.
            assigned = fsdp.Assignment(REPLICATE, "inside of experts")
        params[relative] = {EXPERT_SHARDS if experts else folded_name(mesh): assigned.placement}
        if assigned.reason:
            reasons[relative] = assigned.reason
    if experts and not isinstance(options.get("reshard_after_forward", True), bool):
        options = {k: v for k, v in options.items() if k != "reshard_after_forward"}
    spans = {k: o.span for k, o in winner.written.items()}
    return Application(path, "fsdp", "fsdp", axes, winner.rule, options, spans, params, reasons=reasons)


def _units_of_stages(winners: Mapping[str, Winner], stages: Stages) -> dict[str, Winner]:
    """The units of a model that is cut. Of the modules that cuts divide only the root is one, with the parameters of all:
    a stage leaves their forwards in the middle, so that FSDP would not see them end. Gathered parameters are kept until the
    last microbatch, unless a rule says otherwise: every microbatch would gather them again.
    """
    found = {path: winner for path, winner in winners.items() if path not in stages.divided}
    around = sorted((path for path in winners if path in stages.divided), key=len)
    if around:
        found[""] = dataclasses.replace(winners[around[0]], path="")
    kept = {
        path: dataclasses.replace(
            one, written={"reshard_after_forward": Option(False, one.use.span), **one.written}
        )
        for path, one in found.items()
    }
    return kept
