"""`rehearse`: one rank's real step on the device that is here, with stand-ins for its peers.

Exit status 0 when the step ran and sent what was planned, 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys

from parallelizer.commands.import_torch import import_torch
from parallelizer.commands.json_output import add_json_option, print_json, print_refusal
from parallelizer.commands.setup_options import add_setup_options, read_setup
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError

NAME = "rehearse"
DOC = "run one rank of any mesh on this machine's device, without its peers"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The setup's options, `--json`, the ranks, the steps, and the page."""
    add_setup_options(parser)
    add_json_option(parser)
    parser.add_argument(
        "--rank",
        type=_ranks,
        default=(0,),
        metavar="RANKS",
        help="the ranks to run, one after the other: 0 or 0,7 (0)",
    )
    parser.add_argument("--steps", type=_steps, default=6, help="the steps that are timed (6)")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="also write the output as an HTML page, with the dry run of the first rank",
    )


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks, such as 0,7") from None


def _steps(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Rehearse what the command line asks for, and print it. Returns the exit status."""
    import_torch()
    from parallelizer.child.children import WorldError
    from parallelizer.configuration.step_time import measured_step_time, step_time
    from parallelizer.proof.unsure import UNSURE
    from parallelizer.report.diff import check_rank
    from parallelizer.report.html import page as show_html
    from parallelizer.report.rows.rehearsal import Compared
    from parallelizer.report.targets import check_targets
    from parallelizer.report.text import rehearsal as show
    from parallelizer.simulate.record.planned import planned_of
    from parallelizer.simulate.record.trace import Trace, trace
    from parallelizer.simulate.rehearse.rehearse import rehearse

    compared: list[Compared] = []
    first: Trace | None = None
    try:
        check_targets(arguments.html, None)
        setup = read_setup(arguments)
        model = setup.build_model()
        program, recipe = setup.compile(model, unsure=UNSURE), setup.recipe()
        for rank in arguments.rank:
            check_rank(rank, setup.mesh)
        whole = setup.whole_model(model)
        for rank in arguments.rank:
            step = trace(program, model, recipe, rank)
            first = first or step
            found = rehearse(
                program, model, recipe, rank=rank, device=setup.device, steps=arguments.steps, whole=whole
            )
            times = step_time(setup, step), measured_step_time(setup, step, found.device_seconds)
            compared.append(Compared(planned_of(step), found, *times))
        if arguments.html:
            show_html.write(
                program,
                model,
                first,
                arguments.html,
                device=setup.device,
                hardware=setup.hardware,
                rank=arguments.rank[0],
                time=compared[0].predicted,
                rehearsed=compared,
            )
    except PlanError as error:
        print_refusal(error.diagnostics, arguments.json)
        return 1
    except WorldError as error:
        last = (str(error).strip().splitlines() or ["no reason was given"])[-1]
        print_refusal([_failed(last, arguments.rank[len(compared)])], arguments.json)
        return 1
    if arguments.json:
        print_json({"world_size": setup.mesh.world_size, "ranks": [one.as_json() for one in compared]})
    else:
        show_diagnostics.write(program.diagnostics, sys.stderr)
        show.write(compared, sys.stdout)
    return 1 if any(one.different for one in compared) else 0


def _failed(reason: str, rank: int) -> Diagnostic:
    memory = "OutOfMemoryError" in reason
    advice = (
        "`python -m parallelizer plan` shows how much memory the step needs, and which changes would fit"
        if memory
        else "`python -m parallelizer verify` runs a small form of the model on CPU ranks"
    )
    return Diagnostic("rehearsal-failed", f"rank {rank} cannot be rehearsed: {reason}", None, advice)
