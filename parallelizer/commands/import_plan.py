"""`import-plan`: the plan of a transformers model from its own `tp_plan`, written, or compared with one written before."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallelizer.commands.import_torch import import_torch
from parallelizer.commands.setup_options import add_setup_options, read_setup
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, Findings, PlanError, Span, has_errors

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.configuration.setup import Setup
    from parallelizer.language.plan import Plan
    from parallelizer.propose.from_transformers.proposal import Proposal

NAME = "import-plan"
DOC = "print the plan that a transformers model's own tp_plan comes to"

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


def add_options(parser: argparse.ArgumentParser) -> None:
    """The setup's options and `--check`."""
    add_setup_options(parser)
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="compare a plan with what would be written now: exit 1 with what differs",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, or what differs. Returns the exit status."""
    import_torch()
    from parallelizer.language.load import load_plan
    from parallelizer.propose.from_transformers.changes import changes

    try:
        written = load_plan(arguments.check) if arguments.check else None
        read = read_setup(arguments, planless=True)
        model = read.build_model()
        imported = import_plan(read, model, _command(arguments))
    except PlanError as error:
        show_diagnostics.write(error.diagnostics, sys.stderr)
        return 1
    if written is None:
        show_diagnostics.write(imported.found, sys.stderr)
        sys.stdout.write(imported.text)
        return 1 if has_errors(imported.found) else 0
    differing = changes(model, written, imported.plan, imported.proposal)
    given = f"transformers {_version()} gives {type(model).__name__}"
    if differing:
        print(f"{arguments.check} is not what {given}:", *differing, sep="\n  ")
    else:
        print(f"{arguments.check} is what {given}")
    return 1 if differing else 0


def import_plan(setup: Setup, model: nn.Module, command: str = "") -> Imported:
    """The plan of a model of transformers, on meta.

    A step is followed on tp=2 to find parameters that no entry names and whose gradients differ from rank to rank; their
    rules sum them. Raises PlanError for a model without a `tp_plan`, and for entries that cannot be expressed.
    """
    from parallelizer.compiler.observe.module_calls import observe
    from parallelizer.propose.from_transformers.proposal import propose

    calls = observe(model, setup.workload)
    called = None if calls is None else calls.by_module
    proposal = propose(model, called=called)
    first = _imported(proposal, model, command)
    summed, found = follow(setup, model, first.plan)
    if not summed:
        return Imported(first.text, first.plan, proposal, found)
    proposal = propose(model, summed, called)
    second = _imported(proposal, model, command)
    return Imported(second.text, second.plan, proposal, follow(setup, model, second.plan)[1])


def _imported(proposal: Proposal, model: nn.Module, command: str) -> Imported:
    from parallelizer.propose.from_transformers.write_plan import write_plan

    header = [
        f"{type(model).__name__} by the tp_plan of transformers {_version()}, the residual stream whole on every rank of tp."
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


def _command(arguments: argparse.Namespace) -> str:
    folder = ["--config-dir", arguments.config_dir] if arguments.config_dir else []
    return shlex.join(["python", "-m", "parallelizer", "import-plan", *folder, *arguments.overrides])


def _version() -> str:
    import transformers

    return str(transformers.__version__)
