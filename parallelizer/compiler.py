"""Plan x module tree x mesh -> applications.

The compiler is the tuple `PASSES` and a loop over it. It reads the model (on the meta device or not) and changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer import checks
from parallelizer.diagnostics import Diagnostic, PlanError, Related, Span, has_errors, in_order
from parallelizer.mesh import describe, folded_name
from parallelizer.parse import slot_of
from parallelizer.plan import SLOTS, Flow, Mesh, Placement, Plan, Rule, StyleDefaults, StyleUse
from parallelizer.styles import fsdp as fsdp_style
from parallelizer.styles import io, tensor
from parallelizer.styles.base import FUNCTIONS, ParamPlacements, Sharding, StyleError, Target
from parallelizer.styles.declare import STYLES
from parallelizer.styles.packing import Packing
from parallelizer.suggest import nearest, suggest
from parallelizer.workload import Workload

STYLE_FAMILIES = (tensor, io)
"""Imported for what they register: the functions behind the declared styles."""

Slot = tuple[str, str | None]
"""A slot of a module; the second part is the axis for `io`, the parameter's name for a rule that names one."""


@dataclass(frozen=True)
class Application:
    """One style applied to one module, with the rule it came from.

    `params` are the placements it gives to parameters, named relative to the module; for fsdp under the folded axis, with
    `reasons` why a parameter stays whole. `act` is the ParallelStyle of a tensor style.
    """

    module: str
    slot: str
    style: str
    axes: tuple[str, ...]
    rule: Rule
    options: Mapping[str, Any] = field(default_factory=dict)
    params: ParamPlacements = field(default_factory=dict)
    packed: Mapping[str, Packing] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    act: ParallelStyle | None = None


@dataclass(frozen=True)
class Program:
    """The compiler's output: applications in order, and what they were compiled from.

    `diagnostics` holds warnings and notes; errors are raised instead.
    """

    plan: Plan
    mesh: Mesh
    applications: tuple[Application, ...]
    diagnostics: tuple[Diagnostic, ...] = ()

    def __iter__(self) -> Iterator[Application]:
        return iter(self.applications)

    def __len__(self) -> int:
        return len(self.applications)

    def of_slot(self, *slots: str) -> list[Application]:
        """The applications of one slot or several, in order."""
        return [a for a in self.applications if a.slot in slots]


@dataclass
class Compilation:
    """What the passes hand on to each other."""

    plan: Plan
    model: nn.Module
    mesh: Mesh
    workload: Workload | None
    defaults: Mapping[str, StyleDefaults]
    modules: dict[str, nn.Module] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    winners: dict[tuple[str, Slot], tuple[Rule, StyleUse]] = field(default_factory=dict)
    applications: list[Application] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def find(self, code: str, message: str, span: Span | None, help_text: str | None = None, **more: Any) -> None:
        self.diagnostics.append(Diagnostic(code, message, span, help_text, **more))


def compile(
    plan: Plan,
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    *,
    workload: Workload | None = None,
    defaults: Mapping[str, StyleDefaults] | None = None,
) -> Program:
    """Compile a plan for a model on a mesh.

    `workload` lets batch, sequence and attention heads be checked; `defaults` are a preset's options by style.
    Raises PlanError with every diagnostic that a pass found; the model is left as it was.
    """
    sizes = describe(mesh) if isinstance(mesh, DeviceMesh) else mesh
    state = Compilation(plan, model, sizes, workload, defaults or {})
    state.modules = dict(model.named_modules())
    state.parameters = dict(model.named_parameters())
    for step in PASSES:
        step(state)
        if has_errors(state.diagnostics):
            raise PlanError(state.diagnostics)
    return Program(plan, sizes, tuple(state.applications), in_order(state.diagnostics))


def match(state: Compilation) -> None:
    """Which rule wins each slot of each module. Rules that match nothing, and rules that win nothing, are found here."""
    paths, names = list(state.modules), list(state.parameters)
    last_set: dict[tuple[str, Slot], Rule] = {}
    active: dict[int, bool] = {}
    for rule in state.plan.rules:
        targets: list[tuple[str, str | None]] = [(p, None) for p in rule.glob.select(paths)]
        if not targets:
            found = rule.glob.select(names)
            misfit = next((u for u in rule.uses if not STYLES[u.style].takes_parameters), None)
            if found and misfit:
                state.find("style-on-parameter", f"`{rule.key}` names a parameter, and {misfit.style} takes a module", misfit.span,
                           f"name its module: {found[0].rpartition('.')[0]}")
                continue
            targets = [(n.rpartition(".")[0], n.rpartition(".")[2]) for n in found]
        _report_unmatched(state, rule, bool(targets), [*paths, *names])
        active[id(rule)] = False
        for path, param in targets:
            for slot in SLOTS:
                if slot in rule.empties:
                    for key in [k for k in state.winners if k[0] == path and k[1][0] == slot]:
                        del state.winners[key]
                        last_set.pop(key, None)
                        active[id(rule)] = True
            for use in rule.uses:
                slot_name, axis = slot_of(use)
                state.winners[path, (slot_name, param or axis)] = (rule, use)
    winning = {id(rule) for rule, _ in state.winners.values()}
    for rule in state.plan.rules:
        if rule.uses and id(rule) in active and id(rule) not in winning and not rule.optional and rule.glob.select(paths + names):
            later = next((r for r in reversed(state.plan.rules) if r is not rule and _covers(r, rule, paths)), None)
            severity = "warning" if later is None or later.span.file == rule.span.file else "note"
            state.find("shadowed-rule", f"`{rule.key}` never wins: later rules fill every slot that it fills", rule.span,
                       "remove the rule, or put it behind the others", severity=severity,
                       related=(Related(later.span, "this one wins"),) if later else ())


def _covers(later: Rule, rule: Rule, paths: list[str]) -> bool:
    mine = rule.glob.select(paths)
    return bool(mine) and mine[0] in later.glob.select(paths) and bool(
        later.empties or {slot_of(u) for u in rule.uses} & {slot_of(u) for u in later.uses}
    )


def _report_unmatched(state: Compilation, rule: Rule, matched: bool, names: list[str]) -> None:
    if rule.optional:
        return
    if not matched:
        near = suggest(rule.key, names)
        hint = "; ".join(f"`{g}` matches {n}" for g, n in near) if near else "`python -m parallelizer plan` lists the modules"
        state.find("unmatched-glob", f"`{rule.key}` matches no module", rule.span, f"did you mean {hint}" if near else hint)
        return
    for alternative in rule.glob.unmatched(names):
        near = suggest(alternative, names)
        hint = f"did you mean `{near[0][0]}`?" if near else "take it out of the braces"
        state.find("unmatched-alternative", f"`{alternative}`, one alternative of `{rule.key}`, matches no module", rule.span, hint)


def resolve(state: Compilation) -> None:
    """Options with defaults and layouts filled in; each tensor style asked what it does to its module."""
    repeats: dict[tuple[Any, ...], int] = {}
    failures: dict[tuple[Any, ...], Diagnostic] = {}
    for (path, (slot, detail)), (rule, use) in _in_module_order(state):
        declaration = STYLES[use.style]
        defaults = state.defaults.get(use.style, StyleDefaults())
        if defaults.off:
            continue
        options = {k: o.value for k, o in {**defaults.options, **use.options}.items()}
        options = {k: _resolved(v, state.plan.layouts, state, use) for k, v in options.items()}
        axis = options.get("axis") or declaration.axis
        options["style"] = use.style
        if slot in ("params", "io"):
            axes = _axes_of(options, axis)
            if all(state.mesh.sizes[a] == 1 for a in axes):
                continue
            param = detail if slot == "params" else None
            target = Target(state.modules[path], path, param, options, axis, state.mesh.sizes)
            try:
                result = FUNCTIONS[use.style](target)
            except StyleError as error:
                key = (error.code, rule.span, error.option)
                repeats[key] = repeats.get(key, 0) + 1
                failures.setdefault(key, _failure(state, error, use, axis))
                continue
            if isinstance(result, ParallelStyle):
                result = Sharding(result, (axis,))
            state.applications.append(
                Application(path, slot, use.style, result.axes, rule, options, result.params, result.packed, act=result.style)
            )
        elif slot == "attention":
            if state.mesh.sizes[axis] > 1:
                state.applications.append(Application(path, slot, use.style, (axis,), rule, options))
        elif slot != "fsdp":
            state.applications.append(Application(path, slot, use.style, (), rule, options))
    for key, found in failures.items():
        more = repeats[key] - 1
        message = f"{found.message} ({more} more like it)" if more else found.message
        state.diagnostics.append(dataclasses.replace(found, message=message))


def _in_module_order(state: Compilation) -> list[tuple[tuple[str, Slot], tuple[Rule, StyleUse]]]:
    order = {path: i for i, path in enumerate(state.modules)}
    return sorted(state.winners.items(), key=lambda item: (order[item[0][0]], SLOTS.index(item[0][1][0]), item[0][1][1] or ""))


def _axes_of(options: Mapping[str, Any], axis: str) -> set[str]:
    params: Mapping[str, Mapping[str, Placement]] = options.get("params") or {}
    return {axis} | {a for by_axis in params.values() for a in by_axis if a}


def _failure(state: Compilation, error: StyleError, use: StyleUse, axis: str) -> Diagnostic:
    option = use.options.get(error.option or "")
    span = option.span if option else use.span
    set_here = state.mesh.spans.get(axis)
    related = (Related(set_here, f"{axis}={state.mesh.sizes[axis]} is set here"),) if set_here and error.code == "not-divisible" else ()
    return Diagnostic(error.code, error.message, span, error.help, related=related)


def _resolved(value: Any, layouts: Mapping[str, Placement], state: Compilation, use: StyleUse) -> Any:
    """The value with every layout's name replaced by its placement."""
    if isinstance(value, Placement) and value.kind == "layout":
        if value.name in layouts:
            return dataclasses.replace(layouts[value.name], span=value.span)
        near = nearest(value.name or "", layouts, 1)
        hint = (f"did you mean {near[0]}? " if near else "") + f"the layouts are {', '.join(layouts) or 'none'}"
        state.find("unknown-layout", f"there is no layout {value.name!r}", value.span or use.span, hint)
        return dataclasses.replace(value, kind="replicate")
    if isinstance(value, Flow):
        return Flow(_resolved(value.arrives, layouts, state, use), _resolved(value.wanted, layouts, state, use))
    if isinstance(value, Mapping):
        return {k: _resolved(v, layouts, state, use) for k, v in value.items()}
    return value


def shard_data(state: Compilation) -> None:
    """What each FSDP unit gathers, and on which dimension each of its parameters is sharded."""
    options, rules = {}, {}
    for (path, (slot, _)), (rule, use) in _in_module_order(state):
        if slot != "fsdp":
            continue
        defaults = state.defaults.get("fsdp", StyleDefaults())
        if not defaults.off:
            options[path] = {k: o.value for k, o in {**defaults.options, **use.options}.items()}
            rules[path] = rule
    mesh = state.mesh
    distributed = mesh.fsdp_axes or mesh.sizes["dp_replicate"] > 1
    tensor = tensor_placements(state.applications)
    axis = folded_name(mesh)
    for path, names in fsdp_style.units(state.model, options).items():
        own = options[path]
        if not distributed and not own.get("cpu_offload") and own.get("param_dtype") in (None, "float32"):
            continue
        params, reasons = {}, {}
        for name in names:
            relative = name[len(path) + 1 :] if path else name
            assigned = fsdp_style.assign(
                name, state.parameters[name], own, tensor.get(name, {}), mesh.sizes, mesh.size(*mesh.fsdp_axes)
            )
            params[relative] = {axis: assigned.placement}
            if assigned.reason:
                reasons[relative] = assigned.reason
        axes = tuple(a for a in ("dp_replicate", *mesh.fsdp_axes) if mesh.sizes[a] > 1)
        state.applications.append(Application(path, "fsdp", "fsdp", axes, rules[path], own, params, reasons=reasons))


def tensor_placements(applications: list[Application] | tuple[Application, ...]) -> dict[str, dict[str, Placement]]:
    """Placements that tensor styles give, by full parameter name and axis."""
    found: dict[str, dict[str, Placement]] = {}
    for application in applications:
        if application.slot == "params":
            for name, by_axis in application.params.items():
                full = f"{application.module}.{name}" if application.module else name
                found.setdefault(full, {}).update(by_axis)
    return found


def check(state: Compilation) -> None:
    """Everything that is known before the model runs; one file each in `checks/`."""
    for one in checks.CHECKS:
        state.diagnostics.extend(one(state))


def order(state: Compilation) -> None:
    """Tensor styles, then context parallelism, checkpointing, compile, fsdp; modules in their own order, FSDP innermost first."""
    state.applications.sort(key=lambda a: SLOTS.index(a.slot))


PASSES: tuple[Callable[[Compilation], None], ...] = (match, resolve, shard_data, check, order)
