"""`plan`: the dry run as tables, JSON or a page; as a lock, written or compared; or what differs between two of them.

Exit status 0 when nothing is wrong, 1 when the configuration is, or when a lock differs.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from parallelizer.commands.import_torch import import_torch
from parallelizer.commands.json_output import add_json_option, print_json, print_refusal
from parallelizer.commands.setup_options import add_setup_options, read_setup
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, has_errors, in_order

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.configuration.setup import Setup
    from parallelizer.report.rows.experts import Sharing
    from parallelizer.simulate.record.trace import Trace
    from parallelizer.styles.application import Program

NAME = "plan"
DOC = "print the shards, collectives and memory of each rank"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The setup's options, `--json`, the rank, and what is made of the plan instead of tables."""
    add_setup_options(parser)
    add_json_option(parser)
    parser.add_argument("--rank", type=int, default=0, help="the rank whose shards are shown (0)")
    exclusive = parser.add_mutually_exclusive_group()
    exclusive.add_argument(
        "--lock",
        metavar="FILE",
        help="write shards, collectives and memory to a text file for version control",
    )
    exclusive.add_argument(
        "--locked",
        metavar="FILE",
        help="compare with a file of --lock; if they differ, print the differences and exit with 1",
    )
    exclusive.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help="print the differences between two presets, plans or sets of overrides",
    )
    parser.add_argument("--html", metavar="FILE", help="also write the output as an HTML page")


def run(arguments: argparse.Namespace) -> int:
    """Follow a step of the plan, and print what it takes. Returns the exit status."""
    import_torch()
    from parallelizer.configuration.hardware_device import hardware_device
    from parallelizer.configuration.step_time import step_time
    from parallelizer.configuration.validate import validated
    from parallelizer.configuration.without_float8 import without_float8
    from parallelizer.proof.certificate import FOLDER
    from parallelizer.proof.unsure import UNSURE
    from parallelizer.proof.validate import look
    from parallelizer.report.diff import check_rank
    from parallelizer.report.documents import plan_document
    from parallelizer.report.lock import read_lock
    from parallelizer.report.targets import check_targets
    from parallelizer.report.text import dry_run
    from parallelizer.simulate.time.machine import without_time

    if arguments.diff:
        return _diff(arguments)
    try:
        check_targets(arguments.html, arguments.lock)
        if arguments.locked:
            read_lock(arguments.locked)
        setup = read_setup(arguments)
        if added := hardware_device(setup):
            setup = read_setup(arguments, added)
        model = setup.build_model()
        program = setup.compile(model, unsure=UNSURE)
        check_rank(arguments.rank, setup.mesh)
    except PlanError as error:
        print_refusal(error.diagnostics, arguments.json)
        return 1
    looked = look(setup, model, validated(setup, program, model, rank=arguments.rank, classes=True), FOLDER)
    step, found = looked.validation.trace, looked.found
    time = step_time(setup, step)
    locks = bool(arguments.lock or arguments.locked)
    plain = _without_float8(setup, program, model, arguments.rank) if step is not None and not locks else None
    full = step_time(without_float8(setup), plain) if time is not None else None
    if time is not None:
        found = in_order((*found, *time.assumed))
    elif (note := without_time(setup.hardware)) is not None:
        found = in_order((*found, note))
    if arguments.html:
        from parallelizer.report.html import page as show_html

        try:
            show_html.write(program, model, step, arguments.html, device=setup.device, hardware=setup.hardware,
                            diagnostics=found, rank=arguments.rank, time=time)  # fmt: skip
        except PlanError as error:
            found += error.diagnostics
    differing: list[str] = []
    if locks:
        try:
            differing = _lock(arguments, setup, program, model, step)
        except PlanError as error:
            found += error.diagnostics
    status = 1 if has_errors(found) or differing else 0
    shared = None
    if not locks:
        shared = _shared_out(setup, program, model, step, arguments.rank)
    if arguments.json:
        document = plan_document(
            program, model, setup.device, arguments.rank, step, found, time, full, shared, plain
        )
        print_json({**document, "differences": differing} if arguments.locked else document)
        return status
    if locks:
        show_diagnostics.write(found, sys.stderr)
        _say_locked(arguments, found, differing)
        return status
    dry_run.write(setup, program, model, step, found, arguments.rank, time, full, shared, plain)
    return status


def _without_float8(setup: Setup, program: Program, model: nn.Module, rank: int) -> Trace | None:
    """The step with everything in its own dtype, of a pipeline as a rank of every class; None for a plan without float8, or if
    that step cannot be traced.
    """
    from parallelizer.child.children import WorldError
    from parallelizer.configuration.without_float8 import without_float8
    from parallelizer.simulate.record.trace import trace
    from parallelizer.simulate.record.trace_classes import trace_classes

    if not program.of_slot("precision"):
        return None
    plain = without_float8(setup)
    traced = trace if program.stages is None else trace_classes
    try:
        return traced(plain.compile(model), model, plain.recipe(), rank)
    except (PlanError, WorldError):
        return None


def _shared_out(
    setup: Setup, program: Program, model: nn.Module, step: Trace | None, rank: int
) -> Sharing | None:
    """How experts are shared out, with the memory under other routings if these steps can be followed."""
    from parallelizer.child.children import WorldError
    from parallelizer.report.rows.experts import sharing

    try:
        return sharing(program, model, step, setup.recipe() if step is not None else None, rank)
    except (PlanError, WorldError):
        return sharing(program, model, step, rank=rank)


def _lock(
    arguments: argparse.Namespace, setup: Setup, program: Program, model: nn.Module, step: Trace | None
) -> list[str]:
    """Write or compare a lock; what differs, in words. Raises PlanError when there is nothing to lock, or no
    lock.
    """
    from parallelizer.report import lock
    from parallelizer.report.figures import figures

    if step is None:
        raise PlanError(
            [Diagnostic("lock-incomplete", "the step cannot be traced, so there is nothing to lock")]
        )
    now = figures(program, model, step, setup.workload)
    if arguments.lock:
        lock.write_lock(arguments.lock, now)
        return []
    return lock.check_lock(arguments.locked, now)


def _say_locked(arguments: argparse.Namespace, found: tuple[Diagnostic, ...], differing: list[str]) -> None:
    from parallelizer.report import lock

    if differing:
        print(lock.report(arguments.locked, differing))
    elif not has_errors(found):
        print(f"{arguments.lock}: written" if arguments.lock else f"as locked in {arguments.locked}")


def _diff(arguments: argparse.Namespace) -> int:
    from parallelizer.report import diff

    names = arguments.diff
    try:
        one, other = (
            diff.of_overrides(
                [*arguments.overrides, *diff.side(name, arguments.config_dir)],
                arguments.config_dir,
                arguments.config_name,
                arguments.rank,
            )
            for name in names
        )
    except PlanError as error:
        print_refusal(error.diagnostics, arguments.json)
        return 1
    if arguments.json:
        print_json(diff.document(one, other, names))
    else:
        diff.write(one, other, names, sys.stdout)
    return 0
