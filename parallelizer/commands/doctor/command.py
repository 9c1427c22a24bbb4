"""`doctor`: facts, and trials of what the commands and the recipe need. Exit status 1 where something needed is broken."""

from __future__ import annotations

import argparse
import itertools
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
        sys.stderr.write("parallelizer doctor: error: it looks at the machine, and takes no overrides\n")
        return 2
    if arguments.json:
        report = examine()
        print_json(document(report))
    else:
        report = tell(sys.stdout)
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


def tell(stream: TextIO) -> Report:
    """As `examine`, and print each line as soon as it is known: the trials take half a minute. What needs torch waits until a
    trial has imported it.
    """
    from parallelizer.commands.doctor.facts import GROUPS
    from parallelizer.commands.doctor.trials import all_trials

    trials = all_trials()
    done: list[Trial] = []
    facts: dict[str, dict[str, str]] = {}

    def say(lines: Iterable[str]) -> None:
        stream.writelines(f"{line}\n" for line in lines)
        stream.flush()

    for group, function in GROUPS.items():
        if group == NEEDS_TORCH:
            done.append(next(trials))
        facts[group] = dict(function())
        say(_group(group, facts[group], WIDTH, first=len(facts) == 1))
    say(["", "what works here"])
    for trial in itertools.chain(done[:1], trials):
        done += [] if trial is done[0] else [trial]
        say(_trial(trial, WIDTH))
    report = Report(facts, tuple(done))
    say(_verdict(report))
    return report


WIDTH = len("context-parallel attention, flex")
"""Of the column of names, where they are not known yet."""

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


def text(report: Report) -> str:
    """The report as people paste it into an issue: one line each."""
    rows = [(group, name, value) for group, facts in report.facts.items() for name, value in facts.items()]
    width = max(len(name) for name in (*(r[1] for r in rows), *(t.name for t in report.trials)))
    lines: list[str] = []
    for group, facts in report.facts.items():
        lines += _group(group, facts, width, first=not lines)
    lines += ["", "what works here"]
    for trial in report.trials:
        lines += _trial(trial, width)
    return "\n".join([*lines, *_verdict(report)]) + "\n"


def _group(group: str, facts: Mapping[str, str], width: int, *, first: bool) -> list[str]:
    """The lines of one group of facts; of one that has none, nothing."""
    lines = [f"  {name:{width}}  {value}" for name, value in facts.items()]
    return [*([] if first else [""]), group, *lines] if lines else []


def _trial(trial: Trial, width: int) -> list[str]:
    lines = [f"  {trial.name:{width}}  {trial.state}: {trial.text}"]
    return [*lines, f"  {'':{width}}  {trial.help}"] if trial.help else lines


def _verdict(report: Report) -> list[str]:
    broken = [trial.name for trial in report.trials if trial.needed and trial.state != "works"]
    return ["", f"needed and broken: {', '.join(broken)}" if broken else "all that is needed works"]
