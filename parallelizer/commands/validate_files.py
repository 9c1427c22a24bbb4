"""`validate --quick`: everything that is wrong with what was written, before a model is built.

It needs no torch, so that it answers while one types. It reads a whole configuration as the other commands do
(`validate --quick plan=./mine.yaml parallel=tp2`), or plan files alone
(`validate --quick plans/a.yaml plans/b.yaml`), which is what an editor or a commit hook has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from parallelizer.commands.json_output import print_json
from parallelizer.commands.setup_options import read_setup
from parallelizer.configuration.override_mistakes import OverrideSyntaxError, is_path, override_span
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, has_errors, in_order
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.layout_names import unknown_layouts, unused_layouts
from parallelizer.language.load import find_along, load
from parallelizer.language.plan import Option, Plan, StyleDefaults
from parallelizer.report.documents import validate_document

MAX_FILES = 1000
"""The most plan files in one command."""


def run(arguments: argparse.Namespace) -> int:
    """Check what the command line names, and print it. Returns the exit status.

    Raises OverrideSyntaxError when plan files stand beside overrides.
    """
    files = plan_files(arguments.overrides)
    found: Sequence[Diagnostic]
    said: list[str]
    if files:
        by_file = check_files(files, arguments.config_dir)
        found, said = in_order(one for some in by_file.values() for one in some), _of_files(by_file)
    else:
        found, said = _check_configuration(arguments)
    if arguments.json:
        print_json(validate_document(found))
    else:
        show_diagnostics.write(found, sys.stderr)
        for line in said:
            print(line)
    return 1 if has_errors(found) else 0


def plan_files(words: Sequence[str]) -> list[str]:
    """The words that are paths of plan files: all of them, or none. Raises OverrideSyntaxError for some."""
    files = [word for word in words if is_path(word)]
    if files and len(files) < len(words):
        other = next(word for word in words if word not in files)
        message = (
            "the command names plan files and overrides; a plan file is checked alone or in a configuration"
        )
        help_text = f"write plan={files[0]} to check it with overrides"
        raise OverrideSyntaxError(Diagnostic("override-syntax", message, override_span(other), help_text))
    return files[:MAX_FILES]


def check_files(files: Iterable[str], config_dir: str | None = None) -> dict[str, tuple[Diagnostic, ...]]:
    """What is wrong with plan files, by file, each with what it extends, and no configuration around them."""
    find = find_along([*([Path(config_dir)] if config_dir else []), config_folder()])
    found = {}
    for file in files:
        try:
            found[file] = tuple(check_plan(load(file, find)))
        except PlanError as error:
            found[file] = error.diagnostics
    return found


def _of_files(found: Mapping[str, tuple[Diagnostic, ...]]) -> list[str]:
    """A line for each plan file that is fine, and of several one that counts them."""
    fine = [file for file, some in found.items() if not has_errors(some)]
    lines = [f"{file}: well formed" for file in fine]
    if len(found) > 1:
        wrong = len(found) - len(fine)
        lines.append(
            f"{len(found)} plan files: {len(fine)} well formed" + (f", {wrong} wrong" if wrong else "")
        )
    return lines


def check_plan(plan: Plan, defaults: Iterable[StyleDefaults] = ()) -> Iterator[Diagnostic]:
    """What is wrong with a plan that could be read; `defaults` are what a preset says of styles."""
    written: list[Option] = [o for rule in plan.rules for use in rule.uses for o in use.options.values()]
    written += [option for default in defaults for option in default.options.values()]
    yield from unknown_layouts(written, plan.layouts)
    yield from unused_layouts(plan)


def _check_configuration(arguments: argparse.Namespace) -> tuple[tuple[Diagnostic, ...], list[str]]:
    try:
        read = read_setup(arguments, builds=False)
    except PlanError as error:
        return error.diagnostics, []
    found = in_order((*read.warnings, *check_plan(read.plan, read.defaults.values())))
    fine = f"{read.plan.file} on {read.mesh}: well formed (no model was built)"
    return found, [] if has_errors(found) else [fine]
