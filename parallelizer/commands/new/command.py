"""`new`: a folder to start from. Exit status 0 when it is written, 1 when it cannot be."""

from __future__ import annotations

import argparse
import sys

from parallelizer.configuration.override_mistakes import OverrideSyntaxError, override_span
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError

NAME = "new"
DOC = "copy the training recipe and a small configuration into a folder"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The folder. Other words are left over as overrides, which `run` refuses."""
    parser.add_argument("folder", metavar="DIR", help="a new folder, or one that contains none of the files")
    parser.set_defaults(overrides=[])


def run(arguments: argparse.Namespace) -> int:
    """Write the files, and print what to do next. Raises OverrideSyntaxError for words beside the folder."""
    from pathlib import Path

    from parallelizer.commands.new.create import create

    if arguments.overrides:
        message = f"new takes one folder, and {arguments.overrides[0]} is a second one"
        raise OverrideSyntaxError(
            Diagnostic("override-syntax", message, override_span(arguments.overrides[0]))
        )
    folder = arguments.folder
    try:
        names = create(folder)
    except PlanError as error:
        show_diagnostics.write(error.diagnostics, sys.stderr)
        return 1
    tops = sorted({name.split("/")[0] + "/" * ("/" in name) for name in names})
    print(f"{folder}: {len(names)} files written, {', '.join(tops)}\n")
    if Path(folder).resolve() != Path.cwd():
        print(f"    cd {folder}")
    print("    parallelizer validate --config-dir conf parallel=fsdp2_tp2")
    print("    python -m recipes.train parallel=fsdp2_tp2 train.steps=20\n")
    print(f"{Path(folder) / 'README.md'} explains each file")
    return 0
