"""`doctor`: facts, and trials of what the commands and the recipe need. Exit status 1 where something needed is broken."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
        sys.stderr.write("parallelizer doctor: error: it looks at the machine, and takes no overrides\n")
        return 2
    report = examine()
    if arguments.json:
        print_json(document(report))
    else:
        sys.stdout.write(text(report))
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


def examine() -> Report:
    """Look at everything. The trials come first: they import torch, which the devices are asked through."""
    from parallelizer.commands.doctor.facts import all_facts
    from parallelizer.commands.doctor.trials import all_trials

    trials = tuple(all_trials())
    return Report(all_facts(), trials)


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


def text(report: Report) -> str:
    """The report as people paste it into an issue: one line each."""
    rows = [(group, name, value) for group, facts in report.facts.items() for name, value in facts.items()]
    width = max(len(name) for name in (*(r[1] for r in rows), *(t.name for t in report.trials)))
    lines: list[str] = []
    for at, (group, name, value) in enumerate(rows):
        if at == 0 or rows[at - 1][0] != group:
            lines += ["", group] if lines else [group]
        lines.append(f"  {name:{width}}  {value}")
    lines += ["", "what works here"]
    for trial in report.trials:
        lines.append(f"  {trial.name:{width}}  {trial.state}: {trial.text}")
        if trial.help:
            lines.append(f"  {'':{width}}  {trial.help}")
    broken = [trial.name for trial in report.trials if trial.needed and trial.state != "works"]
    lines += ["", f"needed and broken: {', '.join(broken)}" if broken else "all that is needed works"]
    return "\n".join(lines) + "\n"
