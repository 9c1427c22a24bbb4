"""What a plan wastes, seen in the traced step: warnings and notes with the line of the rule and what it
costs.

redundant-redistribution  a tensor is made whole and split again, or split and made whole, with nothing in
                          between
replicated-logits         every tensor rank holds all logits, where a vocabulary-parallel loss would do with a
                          slice
half-sequence-parallel    some modules work on the sharded sequence, others on the whole one
small-fsdp-units          all-gathers so small that their number costs more than their bytes
large-root-unit           most of the model is gathered at once, though it has layers that could be units
optimizer-collectives     an optimizer that communicates for each parameter
multi-hop-redistribution  a tensor moved over several axes one after the other (`lint_moves.py`)
costly-redistribution     the same, in another order than the cheapest
compile-not-traced        what is compiled was traced as it runs without
tp-crosses-nodes          ranks of tp on several nodes, and what that costs (`across_nodes.py`)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn

from parallelizer.across_nodes import across_nodes, nodes_of
from parallelizer.calls import Journey, Passage, observe
from parallelizer.conversions import Conversion, conversions
from parallelizer.diagnostics import Diagnostic, Related, Span
from parallelizer.fold import fold_paths
from parallelizer.lint_moves import multi_hop_redistributions
from parallelizer.mesh import folded_name
from parallelizer.plan import full_name
from parallelizer.program import Application, Program
from parallelizer.setup import Setup
from parallelizer.simulate.ledger import Entry
from parallelizer.simulate.trace import Trace
from parallelizer.traced import Traced
from parallelizer.units import size
from parallelizer.wire import wire_bytes

SMALL = 1 << 20
"""Bytes of an all-gather below which its latency is most of its time."""
MANY_RANKS, MANY_CALLS = 8, 8
"""Small all-gathers are worth a word from this many ranks and this many calls a step on."""
LARGE_SHARE = 0.5
"""The share of the parameters from which on the root unit is too large."""


def lint(setup: Setup, program: Program, model: nn.Module, trace: Trace) -> tuple[Diagnostic, ...]:
    """Every finding about one traced step; `model` is on meta and left as it is."""
    calls = observe(model, setup.workload, trace.folded)
    span = setup.origins.span("optim.fused") or setup.origins.span("optim")
    accumulate = setup.workload.accumulate
    return findings(Traced(program, model, trace, calls, accumulate, setup.optim, span, setup.hardware))


def findings(traced: Traced) -> tuple[Diagnostic, ...]:
    """Every finding; those of one kind about one rule are one."""
    return tuple(found for one in LINTS for found in one(traced))


def redundant_redistributions(traced: Traced) -> Iterator[Diagnostic]:
    """Between two conversions that undo each other nobody reads the tensor."""
    by_rules: dict[tuple[object, ...], list[tuple[Conversion, Conversion]]] = {}
    for first, second in _undone(traced):
        key = (first.application.rule.span, second.application.rule.span, first.kind, second.kind)
        by_rules.setdefault(key, []).append((first, second))
    for pairs in by_rules.values():
        first, second = pairs[0]
        calls = [e for one, two in pairs for e in _cost(traced, one, two)]
        done = {"gather": "gathered", "reduce": "summed whole", "split": "split"}[first.kind]
        undone = "split again" if second.kind == "split" else "gathered again"
        help_text = "let both rules name the same placement"
        if first.kind == "reduce":
            help_text = f"write `output: {second.after}` where it leaves: a reduce-scatter sends half as much"
        yield Diagnostic(
            "redundant-redistribution",
            f"{_border(first)} of {_modules(c.application for c, _ in pairs)} is {done} over {first.axis} and {undone} as "
            f"{_border(second)} of {_modules(c.application for _, c in pairs)}, with nothing in between: {_sent(calls)}",
            _written(first),
            help_text,
            "warning",
            (Related(_written(second), undone),),
        )


def _undone(traced: Traced) -> Iterator[tuple[Conversion, Conversion]]:
    if traced.calls is None:
        return
    by_module: dict[str, list[Conversion]] = {}
    for application in traced.program.of_slot("params", "io"):
        by_module.setdefault(application.module, []).extend(conversions(application))
    for journey in traced.calls.journeys:
        steps = [(p, c) for p in journey.passages for c in _at(p, by_module.get(p.module, ()))]
        told = False
        for (_, first), (passage, second) in itertools.pairwise(steps):
            opposite = first.kind in ("gather", "reduce") and second.kind == "split"
            opposite |= (first.kind, second.kind) == ("split", "gather")
            # The second of a pair is not also the first of the next one.
            told = opposite and not told and first.axis == second.axis and not _read_before(journey, passage)
            if told:
                yield first, second


def _border(conversion: Conversion) -> str:
    name = "" if conversion.name == "input" else conversion.name
    return "the output" if conversion.leaves else f"the input {name}".rstrip()


def _at(passage: Passage, found: Sequence[Conversion]) -> Iterator[Conversion]:
    """The conversions at one passage, in order: inputs from the outermost style in, outputs from the
    innermost out."""
    here = [c for c in found if c.leaves == passage.leaves and c.kind]
    for conversion in here if passage.leaves else reversed(here):
        if (
            conversion.name == passage.name
            or (conversion.name or "0") == (passage.name or "0")
            or not conversion.name
        ):
            yield conversion


def _read_before(journey: Journey, passage: Passage) -> bool:
    """Whether anybody may read the tensor as it is between two conversions, of which the second is at
    `passage`."""

    def inside(module: str) -> bool:
        return module == passage.module or module.startswith(f"{passage.module}.") or passage.module == ""

    if passage.leaves:
        return any(inside(module) for module in journey.read_in)
    after = journey.passages[journey.passages.index(passage) :]
    return any(not inside(module) for module in journey.read_in) or any(p.leaves for p in after)


def _cost(traced: Traced, first: Conversion, second: Conversion) -> list[Entry]:
    """The collectives of two conversions that undo each other: one gathers in forward, the other its gradient
    in backward."""
    gathers = (first, second) if first.kind != "split" else (second, first)
    forward = traced.entries("forward", first.axis, gathers[0].application.module, "all_gather", "all_reduce")
    backward = traced.entries("backward", first.axis, gathers[1].application.module, "all_gather")
    return forward + backward


def replicated_logits(traced: Traced) -> Iterator[Diagnostic]:
    """The model's output is gathered over its last dimension."""
    for application in traced.program.of_slot("params", "io"):
        if traced.calls is None or application.module not in traced.calls.returned_by:
            continue
        for conversion in conversions(application):
            if not conversion.leaves or conversion.kind != "gather" or not _last(conversion):
                continue
            gathers = traced.entries("forward", conversion.axis, application.module, "all_gather")
            calls = (
                gathers[len(gathers) // traced.accumulate - 1 :: len(gathers) // traced.accumulate]
                if gathers
                else []
            )
            if not calls:
                continue
            held = calls[0].payload_bytes
            yield Diagnostic(
                "replicated-logits",
                f"every rank of {conversion.axis}={calls[0].ranks} holds all logits: {_sent(calls)}, and {size(held)} are held "
                f"where a vocabulary-parallel loss would hold {size(held // calls[0].ranks)}",
                _written(conversion),
                "`output: shard(-1)` and `local: false` leave them sharded, which `parallelizer.cross_entropy` and "
                "`F.cross_entropy` take",
                "note",
            )


def _last(conversion: Conversion) -> bool:
    return conversion.before.dim in (-1, 2)


def half_sequence_parallel(traced: Traced) -> Iterator[Diagnostic]:
    """Sums over an axis leave some modules sharded along the sequence and others whole."""
    leaving = [
        c
        for a in traced.program.of_slot("params", "io")
        for c in conversions(a)
        if c.leaves and c.before.kind == "partial"
    ]
    returned = traced.calls.returned_by if traced.calls else ()
    told = {first.application.module for first, _ in _undone(traced)}
    for axis in dict.fromkeys(c.axis for c in leaving):
        sharded = [c for c in leaving if c.axis == axis and c.after.kind == "shard"]
        whole = [
            c
            for c in leaving
            if c.axis == axis and c.kind == "reduce" and c.application.module not in (*returned, *told)
        ]
        if not sharded:
            continue
        for found in _by_rule(whole):
            calls = [
                e for c in found for e in traced.entries("forward", axis, c.application.module, "all_reduce")
            ]
            saved = sum(e.wire_bytes - wire_bytes("reduce_scatter", e.payload_bytes, e.ranks) for e in calls)
            yield Diagnostic(
                "half-sequence-parallel",
                f"{_many(found, 'leave')} the sequence whole on every rank of {axis}, while {_many(sharded, 'shard')} it: "
                f"{_sent(calls)}, {size(saved)} more than sharded",
                _written(found[0]),
                f"write `output: {sharded[0].after}` there, or `output: replicate` everywhere",
                "warning",
                (Related(_written(sharded[0]), "this one leaves it sharded"),),
            )


def _many(found: Sequence[Conversion], verb: str) -> str:
    return f"{_modules(c.application for c in found)} {verb}{'s' if len(found) == 1 else ''}"


def small_fsdp_units(traced: Traced) -> Iterator[Diagnostic]:
    """Many all-gathers of few bytes over many ranks."""
    units = {a.module: a for a in traced.program.of_slot("fsdp") if a.module}
    calls: dict[str, list[Entry]] = {}
    for entry in _gathers(traced):
        if entry.module in units and entry.ranks >= MANY_RANKS:
            calls.setdefault(entry.module, []).append(entry)
    small = [units[m] for m, entries in calls.items() if max(e.payload_bytes for e in entries) < SMALL]
    for found in _applications_by_rule(small):
        entries = [e for a in found for e in calls[a.module]]
        if len(entries) >= MANY_CALLS:
            average = sum(e.payload_bytes for e in entries) // len(entries)
            yield Diagnostic(
                "small-fsdp-units",
                f"{_modules(found)} {'is' if len(found) == 1 else 'are'} gathered in {len(entries):,} all-gathers a step of "
                f"{size(average)} on average over {entries[0].ranks:,} ranks: below {size(SMALL)} their number is what costs",
                found[0].rule.span,
                "let several be one unit: give the rule to a module around them, or set `min_params` above their size",
                "warning",
            )


def _gathers(traced: Traced) -> list[Entry]:
    """FSDP's all-gathers, each under the unit that it is for."""
    units, axis = {a.module for a in traced.program.of_slot("fsdp")}, folded_name(traced.program.mesh)
    every = (e for e in traced.trace.ledger if e.kind == "all_gather" and e.axis == axis)
    return [e for e in every if e.module in units]


def large_root_unit(traced: Traced) -> Iterator[Diagnostic]:
    """The root gathers most parameters, layers among them that could be units of their own."""
    root = next((a for a in traced.program.of_slot("fsdp") if not a.module), None)
    if root is None or not root.axes:
        return
    sizes = {name: p.numel() for name, p in traced.model.named_parameters()}
    own = [full_name(root.module, name) for name in root.params]
    share = sum(sizes[n] for n in own) / max(sum(sizes.values()), 1)
    layers = _layers(traced.model, own)
    gathered = [e for e in _gathers(traced) if e.phase == "forward" and not e.module]
    if share <= LARGE_SHARE or not layers or not gathered or gathered[0].payload_bytes < SMALL:
        return
    yield Diagnostic(
        "large-root-unit",
        f"the root unit gathers {share:.0%} of the parameters at once: {size(gathered[0].payload_bytes)} lie in full on every "
        "rank from the beginning of forward to the end of backward",
        root.rule.span,
        f"make the layers units: `{layers}: fsdp`",
        "warning",
    )


def _layers(model: nn.Module, names: Iterable[str]) -> str:
    """A glob for repeated layers that have some of the named parameters, or an empty text."""
    names = list(names)
    for path, module in model.named_modules():
        children = [n for n, _ in module.named_children()]
        if len(children) > 1 and all(n.isdigit() for n in children):
            inside = f"{path}." if path else ""
            if any(n.startswith(inside) for n in names):
                return f"{inside}*"
    return ""


def optimizer_collectives(traced: Traced) -> Iterator[Diagnostic]:
    """More collectives in the optimizer than parameters: it reduces for each of them, or more than once."""
    calls = [e for e in traced.trace.ledger if e.phase == "optimizer"]
    parameters = sum(p.requires_grad for p in traced.model.parameters())
    if len(calls) <= parameters:
        return
    fused = traced.optimizer.get("fused", "auto")
    help_text = "use one that works on local shards, as a fused AdamW does"
    if fused is False:
        help_text = "set optim.fused=true: one kernel over the local shards needs none"
    kinds = ", ".join(f"{kind} over {axis}" for kind, axis in dict.fromkeys((e.kind, e.axis) for e in calls))
    yield Diagnostic(
        "optimizer-collectives",
        f"the optimizer communicates for each of its {parameters:,} parameters ({kinds}): {_sent(calls)}",
        traced.optimizer_span,
        help_text,
        "warning",
    )


def compile_not_traced(traced: Traced) -> Iterator[Diagnostic]:
    """Modules run compiled, and the figures are of what they do otherwise."""
    compiled = traced.program.of_slot("compile")
    if compiled:
        yield Diagnostic(
            "compile-not-traced",
            f"{_modules(compiled)} {'are' if len(compiled) > 1 else 'is'} compiled, and traced here as written: "
            "compiled code may need less memory",
            compiled[0].rule.span,
            "collectives and parameters are the same",
            "note",
        )


def tp_crosses_nodes(traced: Traced) -> Iterator[Diagnostic]:
    """What ranks of tp send each other goes over the network where their group does not fit into a node."""
    mesh, hardware = traced.program.mesh, traced.hardware
    yield from across_nodes(mesh, nodes_of(mesh, hardware), hardware, traced.trace.ledger)


LINTS: tuple[Callable[[Traced], Iterator[Diagnostic]], ...] = (
    redundant_redistributions,
    replicated_logits,
    half_sequence_parallel,
    small_fsdp_units,
    large_root_unit,
    optimizer_collectives,
    multi_hop_redistributions,
    compile_not_traced,
    tp_crosses_nodes,
)


def _written(conversion: Conversion) -> Span:
    """Where the layout is written, or the rule if it is a default."""
    application = conversion.application
    return application.spans.get("output" if conversion.leaves else "input") or application.rule.span


def _by_rule(found: Iterable[Conversion]) -> Iterable[list[Conversion]]:
    groups: dict[Span, list[Conversion]] = {}
    for conversion in found:
        groups.setdefault(conversion.application.rule.span, []).append(conversion)
    return groups.values()


def _applications_by_rule(found: Iterable[Application]) -> Iterable[list[Application]]:
    groups: dict[Span, list[Application]] = {}
    for application in found:
        groups.setdefault(application.rule.span, []).append(application)
    return groups.values()


def _modules(applications: Iterable[Application]) -> str:
    """Modules as people read them: few globs, or how many there are."""
    globs = fold_paths(dict.fromkeys(a.module for a in applications))
    shown = ", ".join(g or "the root" for g in globs[:2])
    return shown if len(globs) <= 2 else f"{shown} and {len(globs) - 2} more"


def _sent(calls: Sequence[Entry]) -> str:
    """`4 collectives a step send 8.0 MiB`."""
    return (
        f"{len(calls):,} collective{'' if len(calls) == 1 else 's'} a step send{'s' if len(calls) == 1 else ''} "
        + size(sum(e.wire_bytes for e in calls))
    )
