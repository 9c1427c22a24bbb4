"""`validate --quick`: everything that is wrong with what was written, before a model is built.

It needs no torch, so that it answers while one types. It reads a whole configuration as the other commands do
(`validate --quick plan=./mine.yaml parallel=tp2`), or plan files alone
(`validate --quick plans/a.yaml plans/b.yaml`), which is what an editor or a commit hook has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallelizer.diagnostics import Diagnostic, PlanError, has_errors, in_order
from parallelizer.layouts import unknown_layouts, unused_layouts
from parallelizer.load import config_folder, find_along, load
from parallelizer.override_mistakes import OverrideSyntaxError, override_span
from parallelizer.plan import Option, Plan, StyleDefaults
from parallelizer.show import diagnostics as show_diagnostics
from parallelizer.show.documents import validate_document

if TYPE_CHECKING:
    from parallelizer.setup import Setup

MAX_FILES = 1000
"""The most plan files in one command."""


def run(arguments: argparse.Namespace, setup: Callable[[], Setup]) -> int:
    """Check what the command line names, and print it. Returns the exit status; `setup` reads the
    configuration.

    Raises OverrideSyntaxError when plan files stand beside overrides.
    """
    files = plan_files(arguments.overrides)
    found: Sequence[Diagnostic]
    fine: list[str]
    if files:
        found = check_files(files, arguments.config_dir)
        fine = [f"{file}: well formed" for file in files]
    else:
        found, fine = _check_configuration(setup)
    if arguments.json:
        json.dump(validate_document(found), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        show_diagnostics.write(found, sys.stderr)
        if not has_errors(found):
            print("\n".join(fine))
    return 1 if has_errors(found) else 0


def plan_files(words: Sequence[str]) -> list[str]:
    """The words that are paths of plan files: all of them, or none. Raises OverrideSyntaxError for some."""
    files = [
        word for word in words if "=" not in word and (os.sep in word or word.endswith((".yaml", ".yml")))
    ]
    if files and len(files) < len(words):
        other = next(word for word in words if word not in files)
        message = "a plan file is checked alone, or in a configuration, and here stand both"
        help_text = f"write plan={files[0]} to check it with overrides"
        raise OverrideSyntaxError(Diagnostic("override-syntax", message, override_span(other), help_text))
    return files[:MAX_FILES]


def check_files(files: Iterable[str], config_dir: str | None = None) -> tuple[Diagnostic, ...]:
    """What is wrong with plan files, each with what it extends, and no configuration around them."""
    find = find_along([*([Path(config_dir)] if config_dir else []), config_folder()])
    found: list[Diagnostic] = []
    for file in files:
        try:
            found += check_plan(load(file, find))
        except PlanError as error:
            found += error.diagnostics
    return in_order(found)


def check_plan(plan: Plan, defaults: Iterable[StyleDefaults] = ()) -> Iterator[Diagnostic]:
    """What is wrong with a plan that could be read; `defaults` are what a preset says of styles."""
    written: list[Option] = [o for rule in plan.rules for use in rule.uses for o in use.options.values()]
    written += [option for default in defaults for option in default.options.values()]
    yield from unknown_layouts(written, plan.layouts)
    yield from unused_layouts(plan)


def _check_configuration(setup: Callable[[], Setup]) -> tuple[tuple[Diagnostic, ...], list[str]]:
    try:
        read = setup()
    except PlanError as error:
        return error.diagnostics, []
    found = in_order((*read.warnings, *check_plan(read.plan, read.defaults.values())))
    return found, [f"{read.plan.file} on {read.mesh}: well formed (no model was built)"]
