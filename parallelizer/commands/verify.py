"""`python -m parallelizer verify`: exit status 0 when proven, 1 when not."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from parallelizer.commands.json_output import add_json_option, print_json
from parallelizer.commands.setup_options import add_setup_options, read_setup
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, has_errors

NAME = "verify"
DOC = "prove that the sharded run equals the unsharded one"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The setup's options, `--json`, and those of a proof."""
    add_setup_options(parser)
    add_json_option(parser)
    parser.add_argument(
        "--full-mesh", action="store_true", help="keep the mesh (by default axes above 2 become 2)"
    )
    parser.add_argument("--force", action="store_true", help="run a plan even if it does not compile")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        default="float64",
        help="float64 (the proof); bfloat16 reports its drift from float32",
    )
    parser.add_argument(
        "--proofs", metavar="FOLDER", default=".parallelizer/proofs", help="the folder for the certificate"
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, help="the seed of the initial values and the batches (0)"
    )


def _seed(text: str) -> int:
    """A seed that torch's generators take, with room for the steps'."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if abs(value) >= 2**62:
        raise argparse.ArgumentTypeError(f"{text} is beyond 2^62")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Prove what the command line asks for, and print it. Returns the exit status."""
    started = time.perf_counter()
    from parallelizer.child.children import WorldError
    from parallelizer.configuration.validate import validating
    from parallelizer.proof.certificate import certificate_of, write
    from parallelizer.proof.fingerprint import parts_of
    from parallelizer.proof.prove import check_ranks, prove
    from parallelizer.proof.tiny import small_mesh
    from parallelizer.proof.unsure import UNSURE, only_unsure, settled
    from parallelizer.report.documents import verify_document
    from parallelizer.report.text import proof as show
    from parallelizer.runtime.launch.failures import LaunchError

    found: tuple[Diagnostic, ...] = ()
    try:
        asked = read_setup(arguments)
        check_ranks(asked.mesh if arguments.full_mesh else small_mesh(asked.mesh))
        model = asked.build_model()
        program = asked.compile(model, force=arguments.force, unsure=UNSURE)
        with validating(asked, program, model) as validation:
            try:
                proof = prove(
                    asked,
                    program=program,
                    full_mesh=arguments.full_mesh,
                    seed=arguments.seed,
                    force=arguments.force or only_unsure(program.diagnostics),
                    dtype=arguments.dtype,
                    device="cuda" if asked.device_choice == "cuda" else "cpu",
                )
            finally:
                found = validation().found
    except PlanError as error:
        return _refused((*found, *error.diagnostics), arguments.json)
    except LaunchError as error:
        why = error.help or "ranks failed under the plan, so that nothing could be compared"
        failed = Diagnostic("rank-failed", _line(error.message), None, why)
        return _refused((*found, failed), arguments.json)
    except WorldError as error:
        said = f"the unsharded run failed: {_line(str(error), last=True)}"
        return _refused((*found, Diagnostic("model-failed", said)), arguments.json)
    if proof.passed and proof.is_verdict:
        found = settled(found)
    file: Path | None = None
    if proof.passed and arguments.dtype == "float64" and not has_errors(found):
        try:
            file = write(certificate_of(proof, asked, parts_of(asked, model)), Path(arguments.proofs))
        except PlanError as error:
            found += error.diagnostics
    if arguments.json:
        print_json({**verify_document(proof, found), "certificate": file and str(file)})
    else:
        show_diagnostics.write(found, sys.stderr)
        show.write(proof, sys.stdout, seconds=time.perf_counter() - started)
        if file is not None:
            print(f"certificate: {file}")
    return 0 if proof.passed else 1


def _refused(found: tuple[Diagnostic, ...], as_json: bool) -> int:
    from parallelizer.report.documents import verify_document

    if as_json:
        print_json(verify_document(None, found))
    else:
        show_diagnostics.write(found, sys.stderr)
    return 1


def _line(text: str, last: bool = False) -> str:
    """One line of a traceback: the first, or the last, which names the exception."""
    lines = [line for line in text.strip().splitlines() if line.strip()] or ["no reason was given"]
    return lines[-1 if last else 0]
