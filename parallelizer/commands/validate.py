"""`validate`: what is wrong with a plan and its configuration. Exit status 0 when nothing is an error, else 1."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parallelizer.commands.import_torch import import_torch
from parallelizer.commands.json_output import add_json_option, print_json
from parallelizer.commands.setup_options import add_setup_options, read_setup
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, has_errors

if TYPE_CHECKING:
    from parallelizer.configuration.setup import Setup

NAME = "validate"
DOC = "find all mistakes in the plan and the configuration"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The setup's options, `--json` and `--quick`."""
    add_setup_options(parser)
    add_json_option(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="stop before a model is built; with paths of plan files, read only these files",
    )
    parser.add_argument(
        "--proven", action="store_true", help="require a certificate that exists already, for CI"
    )
    parser.add_argument(
        "--no-proof", action="store_true", help="leave out the proof of the small form on CPU ranks"
    )
    parser.add_argument(
        "--proofs",
        metavar="FOLDER",
        default=".parallelizer/proofs",
        help="the folder of certificates (.parallelizer/proofs)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Validate what the arguments name, and print what is found. Returns the exit status."""
    if arguments.quick:
        if arguments.proven:
            sys.stderr.write(
                "parallelizer validate: error: --proven needs the model, which --quick does not build\n"
            )
            return 2
        from parallelizer.commands import validate_files as quick

        return quick.run(arguments)
    import_torch()
    from parallelizer.proof.validate import check, require_proof, validate
    from parallelizer.report.documents import validate_document

    setup: Setup | None = None
    found: tuple[Diagnostic, ...]
    proof = ""
    try:
        setup = read_setup(arguments)
        if arguments.no_proof and not arguments.proven:
            found = validate(setup, prove=False)
        else:
            ask = require_proof if arguments.proven else check
            checked = ask(setup, Path(arguments.proofs))
            found, proof = checked.found, checked.proof
    except PlanError as error:
        found = error.diagnostics
    if arguments.json:
        print_json(validate_document(found))
    else:
        show_diagnostics.write(found, sys.stderr)
        if setup is not None and not has_errors(found):
            unfollowed = any(d.code == "trace-failed" for d in found)
            verdict = (
                "no mistake found, but the step did not run, so its checks were skipped"
                if unfollowed
                else "valid"
            )
            print(f"{setup.plan.file} on {setup.mesh}: {verdict}")
            if proof:
                print(f"proof: {proof}")
    return 1 if has_errors(found) else 0
