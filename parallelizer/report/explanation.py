"""Why a module or a parameter is laid out as it is: the rules that matched, which won each slot, and where
every option's value comes from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from parallelizer.compiler.attention_method import chosen_methods
from parallelizer.compiler.compilation import Compilation
from parallelizer.compiler.match import match
from parallelizer.compiler.observe.attention_calls import (
    AttentionCall,
    attention_calls,
    projection_of,
    split_projections,
)
from parallelizer.compiler.parameter_shards import ParameterShard, parameter_shards
from parallelizer.compiler.resolve import slot_order
from parallelizer.compiler.wording import flow, layout_names, place, written
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span, quoted
from parallelizer.diagnostics.nearest import nearest
from parallelizer.language.glob import GlobError, escape, parse_glob
from parallelizer.language.parse_rule import slot_of
from parallelizer.language.plan import AXES, SLOTS, Option, Rule, StyleDefaults, StyleUse, full_name
from parallelizer.language.styles import STYLES
from parallelizer.language.suggest import suggest
from parallelizer.report.rows.paths import ROOT
from parallelizer.styles.application import Application, Program, Slot
from parallelizer.styles.conversions import conversions
from parallelizer.styles.tied_parameters import parameter_names


@dataclass(frozen=True)
class Value:
    """An option's value as text; `source` is `rule`, `preset` or `default`, `span` where it was written.

    `layouts` says of the layouts in it what they are, and where they were set.
    """

    name: str
    text: str
    source: str
    span: Span | None = None
    layouts: str = ""


@dataclass(frozen=True)
class Matched:
    """A rule that matched, and for each slot that it fills or empties what became of that.

    An outcome is `wins`, `empties`, or the later rule that took the slot.
    """

    rule: Rule
    outcomes: tuple[tuple[str, str | Rule], ...]


@dataclass(frozen=True)
class Filled:
    """The style that won a slot. `effect` is `applied`, or with a `reason` `no-op`, `off`, or `unknown`.

    `flows` says what happens to inputs and outputs, `notes` what else there is to know: which method attention takes.
    """

    slot: str
    style: str
    axes: tuple[str, ...]
    rule: Rule
    effect: str
    reason: str
    values: tuple[Value, ...]
    flows: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """All that is known of one module, or of one parameter (`parameter` is then its name in the module).

    `unit` is the fsdp application that shards a parameter, or the parameters of the module. `parameters` are
    as one rank holds them; none when the plan does not compile.
    """

    module: str
    parameter: str | None
    kind: str
    rules: tuple[Matched, ...]
    slots: tuple[Filled, ...]
    units: tuple[Application, ...]
    parameters: tuple[ParameterShard, ...]

    @property
    def path(self) -> str:
        """The path from the root."""
        return self.module if self.parameter is None else full_name(self.module, self.parameter)


@dataclass(frozen=True)
class Answer:
    """What was found about a path or glob, with the plan's diagnostics; without a program where the plan does
    not compile.
    """

    word: str
    setup: Setup
    explanations: tuple[Explanation, ...]
    diagnostics: tuple[Diagnostic, ...]


def explain(setup: Setup, word: str, rank: int = 0) -> Answer:
    """Explain every module that a path, folded path or glob names; where it names none, every parameter.

    Raises PlanError when it names nothing, or the model cannot be built.
    """
    model = setup.build_model()
    modules, names = dict(model.named_modules()), parameter_names(model)
    targets = _targets("" if word == ROOT else word, list(modules), list(names))
    state = Compilation(setup.plan, model, setup.mesh, setup.workload, setup.defaults)
    state.modules, state.parameters = modules, dict(model.named_parameters())
    match(state)
    program: Program | None = None
    try:
        program = setup.compile(model)
        found = program.diagnostics
    except PlanError as error:
        found = error.diagnostics
    matched = _matched(setup.plan.rules, list(modules), list(names))
    about = _About(setup, model, state, program, matched, rank)
    return Answer(word, setup, tuple(about.explain(*target) for target in targets), found)


def _targets(word: str, modules: Sequence[str], names: Sequence[str]) -> list[tuple[str, str | None]]:
    """The modules, or else the parameters, with the module of each. Raises PlanError for none."""
    try:
        glob = parse_glob(word)
    except GlobError as error:
        raise _unknown(f"{quoted(word)} is neither a path nor a glob: {error.message}", error.help) from None
    if found := glob.select(modules):
        return [(path, None) for path in found]
    if found := glob.select(names):
        return [(path, leaf) for path, _, leaf in (name.rpartition(".") for name in found)]
    help_text = _meant(word, modules, names)
    raise _unknown(f"nothing in the model is called {quoted(word)}", help_text)


def _meant(word: str, modules: Sequence[str], names: Sequence[str]) -> str:
    """Help for a path that is not there: near paths, a near name anywhere in the model, or what the root has."""
    paths = [path for path in (*modules, *names) if path]
    near = suggest(word, paths)
    if not near:
        leaves = dict.fromkeys(path.rpartition(".")[2] for path in paths)
        anywhere = [f"**.{escape(leaf)}" for leaf in nearest(word.rpartition(".")[2], leaves)]
        near = [(glob, len(parse_glob(glob).select(paths))) for glob in anywhere]
    if near:
        shown = "; ".join(f"`{glob}` (matches {n})" if n > 1 else f"`{glob}`" for glob, n in near)
        return f"did you mean {shown}?"
    top = list(dict.fromkeys(path.partition(".")[0] for path in paths))
    shown = ", ".join(top[:8]) + (", ..." if len(top) > 8 else "")
    return f"the model has {shown}; `python -m parallelizer plan` lists the modules"


def _unknown(message: str, help_text: str) -> PlanError:
    return PlanError([Diagnostic("unknown-path", message, None, help_text)])


def _matched(
    rules: Iterable[Rule], modules: Sequence[str], names: Sequence[str]
) -> list[tuple[Rule, frozenset[str]]]:
    """Each rule with the modules, or else the parameters, that it names."""
    return [(rule, frozenset(rule.glob.select(modules) or rule.glob.select(names))) for rule in rules]


@dataclass(frozen=True)
class _About:
    """What explanations are made from."""

    setup: Setup
    model: nn.Module
    state: Compilation
    program: Program | None
    matched: Sequence[tuple[Rule, frozenset[str]]]
    rank: int

    def explain(self, module: str, parameter: str | None) -> Explanation:
        full = module if parameter is None else full_name(module, parameter)
        own = {
            full_name(module, name)
            for name, _ in self.model.get_submodule(module).named_parameters(recurse=False)
        }
        about = {module, full} if parameter is not None else {module, *own}
        rules = [rule for rule, names in self.matched if not about.isdisjoint(names)]
        winners = self.state.winners.get(module, {})
        seen = {
            slot: won
            for slot, won in winners.items()
            if parameter is None or slot[0] != "params" or slot[1] in (None, parameter)
        }
        slots = [self._filled(module, slot, *seen[slot]) for slot in sorted(seen, key=slot_order)]
        shards = self._shards(full, parameter is not None)
        return Explanation(
            module,
            parameter,
            type(self.model.get_submodule(module)).__name__,
            tuple(self._outcomes(rule, rules, seen) for rule in rules),
            tuple(slots),
            self._units({shard.name for shard in shards}),
            tuple(shards),
        )

    def _outcomes(
        self, rule: Rule, rules: Sequence[Rule], winners: Mapping[Slot, tuple[Rule, StyleUse]]
    ) -> Matched:
        outcomes: list[tuple[str, str | Rule]] = []
        for use in rule.uses:
            slot, axis = slot_of(use)
            won = any(other is rule and its is use for other, its in winners.values())
            shown = f"{slot} on {axis}" if slot == "io" else slot
            outcomes.append((shown, "wins" if won else _taker(rule, (slot, axis), rules)))
        filled = {slot_of(use)[0] for use in rule.uses}
        if set(SLOTS) <= rule.empties:
            outcomes.append(("every other slot" if filled else "every slot", "empties"))
        else:
            outcomes += [(slot, "empties") for slot in SLOTS if slot in rule.empties]
        return Matched(rule, tuple(outcomes))

    def _filled(self, module: str, slot: Slot, rule: Rule, use: StyleUse) -> Filled:
        defaults = self.setup.defaults.get(use.style, StyleDefaults())
        values = tuple(self._values(use, defaults))
        if defaults.off:
            where = self.setup.origins.span(f"parallel.styles.{use.style}")
            reason = f"parallel.styles.{use.style} is null" + (f", {place(where)}" if where else "")
            return Filled(slot[0], use.style, (), rule, "off", reason, values)
        if self.program is None:
            return Filled(slot[0], use.style, (), rule, "unknown", "the plan does not compile", values)
        applied = [a for a in self.program if a.module == module and a.style == use.style and a.rule is rule]
        if applied:
            axes = tuple(dict.fromkeys(axis for a in applied for axis in a.axes))
            flows = tuple(flow(c) for a in applied for c in conversions(a))
            notes = tuple(n for a in applied if a.slot == "attention" for n in self._methods(a))
            return Filled(slot[0], use.style, axes, rule, "applied", "", values, flows, notes)
        return Filled(slot[0], use.style, (), rule, "no-op", self._idle(use, defaults), values)

    def _idle(self, use: StyleUse, defaults: StyleDefaults) -> str:
        """Why a style that won does nothing."""
        sizes, options = self.setup.mesh.sizes, {**defaults.options, **use.options}
        if use.style == "fsdp":
            if self.setup.mesh.size("dp_replicate", "dp_shard", "cp") > 1:
                least = options.get("min_params")
                fewer = f", fewer than min_params={least.value:,}" if least else ""
                return f"it has no parameters left to shard{fewer}, or shares them all: the unit around takes them"
            return "dp_replicate, dp_shard and cp are 1, and neither dtype nor place changes"
        axes = [options["axis"].value] if "axis" in options else [STYLES[use.style].axis or ""]
        if "params" in use.options:
            by_axes = use.options["params"].value.values()
            axes = sorted({a or axes[0] for by_axis in by_axes for a in by_axis}, key=AXES.index) or axes
        which = " and ".join(axis for axis in axes if sizes.get(axis) == 1)
        if not which:
            return "its layout is replicate"
        where = [self.setup.mesh.spans[a] for a in axes if a in self.setup.mesh.spans]
        verb = "is" if " and " not in which else "are"
        return f"{which} {verb} 1" + (f", {place(where[0])}" if where else "")

    def _methods(self, a: Application) -> tuple[str, ...]:
        if a.options.get("method") not in ("auto", "ulysses-ring"):
            return ()
        split, tp, share = split_projections(self.program or ()), self.setup.mesh.sizes["tp"], {}
        if tp > 1:
            modules = self.state.modules
            share = {call.path: tp for call, _ in self.calls if projection_of(call, modules, split)}
        return chosen_methods(a, self.setup.mesh.sizes[a.axes[0]], self.calls, share)

    @functools.cached_property
    def calls(self) -> list[tuple[AttentionCall, tuple[str, ...]]]:
        """The model's attention calls; none where they are not known."""
        work = self.setup.workload
        if self.program is None or work is None:
            return []
        return list(attention_calls(self.program.applications, self.model, work))

    def _values(self, use: StyleUse, defaults: StyleDefaults) -> Iterable[Value]:
        declared = STYLES[use.style]
        for name in declared.options:
            option, source = use.options.get(name), "rule"
            if option is None:
                option, source = defaults.options.get(name), "preset"
            if option is not None:
                yield Value(name, written(option.value), source, option.span, self._layouts(option))
            elif name == "axis" and declared.axis:
                yield Value(name, declared.axis, "default")
            elif name in declared.defaults:
                yield Value(name, self._default(use, name), "default")

    def _default(self, use: StyleUse, name: str) -> str:
        """The value of an option that nothing sets. A pipeline keeps what fsdp has gathered until the last microbatch."""
        if use.style == "fsdp" and name == "reshard_after_forward" and self.setup.mesh.sizes["pp"] > 1:
            return "false, because the mesh has pp"
        return STYLES[use.style].defaults[name]

    def _layouts(self, option: Option) -> str:
        layouts = self.setup.plan.layouts
        names = [name for name in dict.fromkeys(layout_names(option.value)) if name in layouts]
        said = [f"{n} is {layouts[n]}" + (f", {place(s)}" if (s := layouts[n].span) else "") for n in names]
        return "; ".join(said)

    def _shards(self, path: str, exact: bool) -> list[ParameterShard]:
        if self.program is None:
            return []
        owner = {id(p): name for name, p in self.model.named_parameters()}
        if exact:  # by its other name, where it is tied
            path = owner.get(id(self.model.get_parameter(path)), path)
        shards = parameter_shards(self.program, self.model, self.rank)
        inside = f"{path}." if path else ""
        return [s for s in shards if s.name == path or (not exact and s.name.startswith(inside))]

    def _units(self, names: set[str]) -> tuple[Application, ...]:
        units = self.program.of_slot("fsdp") if self.program else []
        return tuple(u for u in units if any(full_name(u.module, name) in names for name in u.params))


def _taker(rule: Rule, slot: Slot, rules: Sequence[Rule]) -> Rule:
    """The last rule behind this one that filled or emptied a slot."""
    behind = rules[next(at for at, other in enumerate(rules) if other is rule) + 1 :]
    takers = [r for r in behind if slot[0] in r.empties or slot in map(slot_of, r.uses)]
    return takers[-1] if takers else rule
