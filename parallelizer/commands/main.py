"""The command line: `python -m parallelizer COMMAND [overrides]`, with the same overrides as the recipe.

Exit status 0: fine. 1: the configuration is wrong, diagnostics printed. 2: the command line does not parse.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from parallelizer.child import cuda_use
from parallelizer.commands import (
    export,
    generate,
    import_plan,
    init,
    plan,
    rehearse,
    schema,
    search,
    train,
    validate,
    verify,
)
from parallelizer.commands.doctor import command as doctor
from parallelizer.commands.explain import command as explain
from parallelizer.commands.new import command as new
from parallelizer.commands.unknown_words import Parser, refuse_options
from parallelizer.configuration.override_mistakes import OverrideSyntaxError
from parallelizer.diagnostics import interrupts
from parallelizer.diagnostics import render as show_diagnostics


class Command(Protocol):
    """The module of a command. All of them are imported before any is chosen, so `run` imports what is slow to import.

    One that has WHOLE_LINE takes the words behind its name as they are, options too, as `overrides`.
    """

    NAME: str
    DOC: str
    """What `--help` says, without a full stop."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options. One without `overrides` sets them to [] for the words that are left over."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command. Returns the exit status."""


COMMANDS: tuple[Command, ...] = (
    validate,
    plan,
    search,
    verify,
    rehearse,
    train,
    generate,
    export,
    import_plan,
    schema,
    init,
    explain,
    new,
    doctor,
)
"""In the order of `--help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    cuda_use.ask_by_nvml()
    arguments = parse(argv)
    # As `python -m` does: a model's class may live in the folder the command runs in.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except OverrideSyntaxError as error:
        show_diagnostics.write([error.diagnostic], sys.stderr)
        return 2
    except BrokenPipeError:
        return interrupts.reader_gone()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; overrides may stand before, between and behind the options."""
    words = list(sys.argv[1:] if argv is None else argv)
    for command in COMMANDS:
        if words[:1] == [command.NAME] and getattr(command, "WHOLE_LINE", False):
            return argparse.Namespace(command=command.NAME, run=command.run, overrides=words[1:])
    parser, parsers = make_parser(COMMANDS)
    arguments, rest = parser.parse_known_args(argv)
    refuse_options(rest, arguments.command, parsers)
    arguments.overrides += rest
    return arguments


def make_parser(
    commands: Sequence[Command],
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of the commands by name."""
    parser = Parser("parallelizer", description="Parallelism for PyTorch models as data.")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands:
        own = parsers.add_parser(command.NAME, help=command.DOC, description=command.DOC + ".")
        command.add_options(own)
        own.set_defaults(run=command.run)
    return parser, parsers.choices
