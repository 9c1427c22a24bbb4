"""`explain`: a code, all codes, or the rules on a module or parameter. Exit status 1 when there is no such thing."""

from __future__ import annotations

import argparse
import sys

from parallelizer.commands.import_torch import import_torch
from parallelizer.commands.json_output import add_json_option, print_json, print_refusal
from parallelizer.commands.setup_options import add_setup_options, read_setup
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import PlanError, has_errors

NAME = "explain"
DOC = "print the meaning of a code, or the rules that apply to a module or parameter"


def add_options(parser: argparse.ArgumentParser) -> None:
    """A code, a path, or nothing; the setup's options and the rank are for a path."""
    parser.add_argument(
        "word", nargs="?", metavar="CODE|PATH", help="without it, list all codes, one on each line"
    )
    add_setup_options(
        parser,
        overrides="Hydra overrides, for a path",
        config_dir="as for the other commands",
        config_name="as for the other commands",
    )
    parser.add_argument("--rank", type=int, default=0, help="the rank whose shards are shown (0)")
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explain a registered code as one, and any other word as the path of a module or parameter."""
    from parallelizer.commands.explain import codes

    if arguments.word is None or codes.is_code(arguments.word):
        if arguments.json:
            print_json(codes.document(arguments.word))
        elif arguments.word is None:
            codes.list_codes(sys.stdout)
        else:
            codes.explain_code(arguments.word, sys.stdout)
        return 0
    return _explain_path(arguments)


def _explain_path(arguments: argparse.Namespace) -> int:
    import_torch()
    from parallelizer.commands.explain import codes
    from parallelizer.report.diff import check_rank
    from parallelizer.report.documents import explain_document
    from parallelizer.report.explanation import explain
    from parallelizer.report.text import explanation as show_explain

    try:
        setup = read_setup(arguments)
        check_rank(arguments.rank, setup.mesh)
        if arguments.json:
            answer = explain(setup, arguments.word, arguments.rank)
            print_json(explain_document(answer))
        else:
            answer = show_explain.explain_path(setup, arguments.word, sys.stdout, rank=arguments.rank)
            sys.stdout.flush()
            show_diagnostics.write((d for d in answer.diagnostics if d.severity == "error"), sys.stderr)
    except PlanError as error:
        found = error.diagnostics
        no_path = any(d.code == "unknown-path" and "did you mean" not in (d.help or "") for d in found)
        if no_path and codes.nearest_codes(arguments.word):
            found = (codes.unknown(arguments.word),)
        print_refusal(found, arguments.json)
        return 1
    return 1 if has_errors(answer.diagnostics) else 0
