"""`schema`: the JSON Schema of plan files or presets, with the styles that the configuration imports."""

from __future__ import annotations

import argparse
import sys

from parallelizer.commands.json_output import print_json
from parallelizer.commands.setup_options import add_setup_options
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import PlanError

NAME = "schema"
DOC = "print the JSON Schema of plan files, for editors"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The setup's options and `--preset`."""
    add_setup_options(parser)
    parser.add_argument("--preset", action="store_true", help="print the schema of presets instead")


def run(arguments: argparse.Namespace) -> int:
    """Print the schema. Returns the exit status: 1 when the configuration or its imports cannot be read."""
    from parallelizer.configuration.compose import compose_config
    from parallelizer.configuration.read_setup import import_styles
    from parallelizer.language.schema.schema import plan_schema, preset_schema
    from parallelizer.language.styles import STYLES

    try:
        composed = compose_config(arguments.overrides, arguments.config_dir, arguments.config_name)
        import_styles(*composed)
    except PlanError as error:
        show_diagnostics.write(error.diagnostics, sys.stderr)
        return 1
    print_json(preset_schema(STYLES) if arguments.preset else plan_schema(STYLES))
    return 0
