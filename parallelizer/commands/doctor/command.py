"""`doctor`: facts, and trials of what the commands and the recipe need. Exit status 1 where something needed is broken."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from parallelizer.commands.json_output import add_json_option, print_json

if TYPE_CHECKING:
    from parallelizer.commands.doctor.trials import Trial

NAME = "doctor"
DOC = "print the installed versions and the features that work, for a bug report"


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--json`. Words are left over as overrides, which `run` refuses."""
    add_json_option(parser)
    parser.set_defaults(overrides=[])


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Returns 0, or 1 where something that is needed does not work, or 2 for overrides."""
    if arguments.overrides:
        sys.stderr.write("parallelizer doctor: error: doctor takes no overrides\n")
        return 2
    report = examine(None if arguments.json else sys.stdout)
    if arguments.json:
        print_json(document(report))
    return 0 if report.healthy else 1


@dataclass(frozen=True)
class Report:
    """Facts by group and name, and trials."""

    facts: Mapping[str, Mapping[str, str]]
    trials: tuple[Trial, ...]

    @property
    def healthy(self) -> bool:
        """Whether everything that is needed works."""
        return not any(trial.needed and trial.state != "works" for trial in self.trials)


def examine(stream: TextIO | None = None) -> Report:
    """Collect the facts and run the trials. Each line is written to `stream` as soon as it is known: the trials take half a
    minute. The facts of the devices need torch, which the first trial imports.
    """
    from parallelizer.commands.doctor.facts import GROUPS
    from parallelizer.commands.doctor.trials import all_trials

    trials = all_trials()
    done: list[Trial] = []
    facts: dict[str, dict[str, str]] = {}

    def say(lines: Iterable[str]) -> None:
        if stream is not None:
            stream.writelines(f"{line}\n" for line in lines)
            stream.flush()

    for group, function in GROUPS.items():
        if group == NEEDS_TORCH:
            done.append(next(trials))
        facts[group] = dict(function())
        say(_group(group, facts[group], first=len(facts) == 1))
    say(["", "what works here", *(line for trial in done for line in _trial(trial))])
    for trial in trials:
        done.append(trial)
        say(_trial(trial))
    report = Report(facts, tuple(done))
    say(_verdict(report))
    return report


WIDTH = len("context-parallel attention, flex")
"""The width of the column of names: the longest of them."""

NEEDS_TORCH = "devices"


def document(report: Report) -> dict[str, Any]:
    """The JSON of `doctor --json`."""
    return {
        "healthy": report.healthy,
        **{group: dict(facts) for group, facts in report.facts.items()},
        "trials": [
            {"name": t.name, "state": t.state, "text": t.text, "help": t.help or None, "needed": t.needed}
            for t in report.trials
        ],
    }


def _group(group: str, facts: Mapping[str, str], *, first: bool) -> list[str]:
    """The lines of one group of facts; none for a group without facts."""
    lines = [f"  {name:{WIDTH}}  {value}" for name, value in facts.items()]
    return [*([] if first else [""]), group, *lines] if lines else []


def _trial(trial: Trial) -> list[str]:
    lines = [f"  {trial.name:{WIDTH}}  {trial.state}: {trial.text}"]
    return [*lines, f"  {'':{WIDTH}}  {trial.help}"] if trial.help else lines


def _verdict(report: Report) -> list[str]:
    broken = [trial.name for trial in report.trials if trial.needed and trial.state != "works"]
    return ["", f"needed, but broken: {', '.join(broken)}" if broken else "everything that is needed works"]
