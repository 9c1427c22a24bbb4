"""The plan of a transformers model from its own `tp_plan`: proposed, followed on tp=2, and proposed again with what it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic, Findings, PlanError, Span

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.configuration.setup import Setup
    from parallelizer.language.plan import Plan
    from parallelizer.language.workload import Workload
    from parallelizer.propose.from_transformers.proposal import Proposal

FILE = "<imported>"
SIZES = ("not-divisible", "heads-not-divisible", "sequence-not-divisible", "batch-not-divisible")
"""Codes that say something of the sizes of the model and of tp=2, and nothing of the plan."""


@dataclass(frozen=True)
class Imported:
    """The text of a plan, what it was made of, and what following a step of it on tp=2 found."""

    text: str
    plan: Plan
    proposal: Proposal
    found: tuple[Diagnostic, ...] = ()


def import_plan(setup: Setup, model: nn.Module, command: str = "") -> Imported:
    """The plan of a model of transformers, on meta.

    A step is followed on tp=2 to find parameters that no entry names and whose gradients differ from rank to rank; their
    rules sum them. If the step does not run, parameters that no entry names and that meet what is split are split too, and
    outputs that the forward changes in place are copied.
    Raises PlanError for a model without a `tp_plan`, and for entries that cannot be expressed.
    """
    from parallelizer.compiler.observe.module_calls import observe
    from parallelizer.propose.from_transformers.proposal import propose

    calls = observe(model, setup.workload)
    called = None if calls is None else calls.by_module
    proposal = propose(model, called=called)
    first = _imported(proposal, model, command)
    summed, found = follow(setup, model, first.plan)
    seen = _seen(setup, model) if any(d.code == "does-not-run" for d in found) else _ShownByForward()
    if seen.split or seen.changed:
        proposal = propose(model, summed, called, seen.split, seen.changed)
        first = _imported(proposal, model, command)
        summed, found = follow(setup, model, first.plan)
    if not summed:
        return Imported(first.text, first.plan, proposal, found)
    proposal = propose(model, summed, called, seen.split, seen.changed)
    second = _imported(proposal, model, command)
    return Imported(second.text, second.plan, proposal, follow(setup, model, second.plan)[1])


@dataclass(frozen=True)
class _ShownByForward:
    """What a forward shows: the parameters that meet heads or features which can be split, with the dimension along which, and
    the linears whose output it changes in place.
    """

    split: Mapping[str, int] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()


def _seen(setup: Setup, model: nn.Module) -> _ShownByForward:
    from parallelizer.child.children import WorldError, in_children

    try:
        (found,) = in_children([(_watched, model, setup.workload)])
    except WorldError:  # it cannot be watched
        return _ShownByForward()
    return found


def _watched(model: nn.Module, workload: Workload) -> _ShownByForward:
    """Uses this process's model up."""
    from parallelizer.propose.from_forward.observe import watch
    from parallelizer.propose.from_forward.roles import roles

    regions = roles(model, watch(model, workload)).regions
    met = {name: dim for region in regions for name, (dim, parts) in region.carried.items() if not parts}
    return _ShownByForward(met, frozenset().union(*(region.changed for region in regions)))


def _imported(proposal: Proposal, model: nn.Module, command: str) -> Imported:
    from parallelizer.propose.from_transformers.write_plan import write_plan

    header = [
        f"{type(model).__name__} by the tp_plan of transformers {release()}, the residual stream whole on every rank of tp."
    ]
    header += (
        [f"Written by `{command}`;", "`--check FILE` tells what another release would change."]
        if command
        else []
    )
    text = write_plan(proposal, header)
    return Imported(text, parsed(text), proposal)


def parsed(text: str) -> Plan:
    """The plan that a text is. Raises PlanError."""
    from parallelizer.language.parse_plan import parse_plan
    from parallelizer.language.plan import Plan
    from parallelizer.language.yaml_nodes import MappingNode, read

    findings, node = Findings(), read(text, FILE)
    written = node if isinstance(node, MappingNode) else MappingNode((), Span(FILE))
    plan = parse_plan(written, Plan("imported", FILE), findings)
    if findings.items:
        raise PlanError(findings.items)
    return plan


def follow(setup: Setup, model: nn.Module, plan: Plan) -> tuple[frozenset[str], tuple[Diagnostic, ...]]:
    """The parameters whose gradients nothing sums on tp=2, though they differ over it, and all that is found of the plan
    there.
    """
    from parallelizer.compiler.compile import compile as compile_plan
    from parallelizer.configuration.validate import validated
    from parallelizer.language.plan import Mesh
    from parallelizer.simulate.checks.varying_gradient import unreduced

    try:
        program = compile_plan(plan, model, Mesh({"tp": 2}), workload=setup.workload)
    except PlanError as error:
        serious = [d for d in error.diagnostics if d.code not in SIZES]
        return frozenset(), tuple(serious)
    validation = validated(setup, program, model)
    flow = validation.flow
    if flow is None:
        return frozenset(), validation.found
    names = frozenset(name for one in unreduced(flow) for name in flow.paths(one.parameter))
    return names, validation.found


def release() -> str:
    """The release of transformers."""
    import transformers

    return str(transformers.__version__)
