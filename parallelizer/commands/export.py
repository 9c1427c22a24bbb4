"""`export`: the plan as Python that needs nothing of this package. Exit status 0 when printed, 1 when refused."""

from __future__ import annotations

import argparse
import shlex
import sys

from parallelizer.commands.import_torch import import_torch
from parallelizer.commands.setup_options import add_setup_options, read_setup
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import PlanError

NAME = "export"
DOC = "print the plan as plain Python on torch's public APIs"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The setup's options."""
    add_setup_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the code. Returns the exit status."""
    import_torch()
    from parallelizer.compiler.observe.module_calls import observe
    from parallelizer.report.export.export import export

    try:
        setup = read_setup(arguments)
        model = setup.build_model()
        program = setup.compile(model)
        folder = ["--config-dir", arguments.config_dir] if arguments.config_dir else []
        command = shlex.join(["python", "-m", "parallelizer", "export", *folder, *arguments.overrides])
        code = export(program, model, observe(model, setup.workload), command)
    except PlanError as error:
        show_diagnostics.write(error.diagnostics, sys.stderr)
        return 1
    show_diagnostics.write(program.diagnostics, sys.stderr)
    sys.stdout.write(code)
    return 0
