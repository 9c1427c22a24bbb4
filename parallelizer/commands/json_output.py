"""`--json`: one JSON document on stdout, also where a command has nothing else to print than diagnostics."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document on stdout, and nothing else"
    )


def print_json(document: dict[str, Any]) -> None:
    """Print a document, indented, and a line end."""
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")


def print_refusal(found: Iterable[Diagnostic], as_json: bool) -> None:
    """Print why there is nothing to show: as JSON on stdout, or in words on stderr."""
    from parallelizer.report.documents import refusal_document

    if as_json:
        print_json(refusal_document(found))
    else:
        show_diagnostics.write(found, sys.stderr)
