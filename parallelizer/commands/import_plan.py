"""`import-plan`: the plan of a transformers model from its own `tp_plan`, written, or compared with one written before."""

from __future__ import annotations

import argparse
import shlex
import sys

from parallelizer.commands.import_torch import import_torch
from parallelizer.commands.setup_options import add_setup_options, read_setup
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import PlanError, has_errors

NAME = "import-plan"
DOC = "convert a transformers model's own tp_plan to a plan"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The setup's options and `--check`."""
    add_setup_options(parser)
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="compare a plan with the current translation; if they differ, print the differences and exit with 1",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, or what differs. Returns the exit status."""
    import_torch()
    from parallelizer.language.load import load_plan
    from parallelizer.propose.from_transformers.changes import changes
    from parallelizer.propose.from_transformers.imported import import_plan, release

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
    given = f"transformers {release()} gives {type(model).__name__}"
    if differing:
        print(f"{arguments.check} is not what {given}:", *differing, sep="\n  ")
    else:
        print(f"{arguments.check} is what {given}")
    return 1 if differing else 0


def _command(arguments: argparse.Namespace) -> str:
    folder = ["--config-dir", arguments.config_dir] if arguments.config_dir else []
    return shlex.join(["python", "-m", "parallelizer", "import-plan", *folder, *arguments.overrides])
