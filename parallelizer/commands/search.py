"""`search`: the mesh and the options that make a step fastest on a number of GPUs, as a preset.

Exit status 0 when something fits, 1 when nothing does or the configuration is wrong, 130 after Ctrl-C, which prints the best
so far.
"""

from __future__ import annotations

import argparse
import gc
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parallelizer.commands.import_torch import import_torch
from parallelizer.commands.json_output import add_json_option, print_json, print_refusal
from parallelizer.commands.setup_options import add_setup_options
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError

if TYPE_CHECKING:
    from parallelizer.propose.search.found import SearchResult
    from parallelizer.propose.search.run import Search
    from parallelizer.propose.search.task import SearchTask

NAME = "search"
DOC = "find the fastest mesh and options for a number of GPUs, as a preset"

PRICE_KEY = "hardware.price_per_hour"

SHOWN, MOST = 5, 10
"""Candidates that are shown by default, and at most: those fit, and were dry-run."""

COLLECTED = (100_000, 20, 100)
"""Objects after which Python looks for garbage, by generation. A search makes millions, few of them in cycles: with Python's own
numbers, looking for them takes a tenth of its time.
"""

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
"""The units of `--memory`."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The setup's options, the limits of the search, and what is made of its results."""
    add_setup_options(
        parser,
        overrides="Hydra overrides, as for the recipe, with hardware=<kind>, and gpus=<number of GPUs>",
    )
    add_json_option(parser)
    parser.add_argument(
        "--within",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="what is tried of a key: mesh.tp=1..8, pipeline.schedule=1f1b,zbv, or * for all; may be given again. "
        "docs/search.md lists the keys",
    )
    parser.add_argument(
        "--memory",
        type=_bytes,
        metavar="SIZE",
        help="the memory that a step may use on a device, such as 72GiB; by default nine tenths of the device's memory",
    )
    parser.add_argument(
        "--for",
        dest="aim",
        choices=("time", "memory", "cost"),
        default="time",
        help="the least time on these GPUs (the default), the fewest of them that hold the step, or the least cost of a step, "
        "also of several kinds: hardware=h100,h200",
    )
    parser.add_argument(
        "--top",
        type=_count,
        metavar="N",
        help=f"how many are shown, up to {MOST}: by default the best {SHOWN}, fewer of a large model, whose dry runs take long",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write the best as a preset, such as conf/parallel/found.yaml"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file of --output")
    parser.add_argument(
        "--lock",
        metavar="FILE",
        help="also write the best preset's lock, as `plan --lock` does: what a rank holds, sends and needs",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="also write the results as an HTML page, for which up to three more candidates with less memory are dry-run",
    )


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([\d.]+) ?([KMGT]?I?B?)", text.strip().upper())
    try:
        if found and found[2] in UNITS and float(found[1]) > 0:
            return int(float(found[1]) * UNITS[found[2]])
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is no size: write a number and B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, as in 72GiB"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Search, and print the best. Returns the exit status."""
    import_torch()
    gc.set_threshold(*COLLECTED)
    from parallelizer.propose.search.aims import COST, pursue
    from parallelizer.propose.search.nothing import nothing, too_little
    from parallelizer.propose.search.page import page
    from parallelizer.propose.search.reasons import comments
    from parallelizer.propose.search.remedy import remedies
    from parallelizer.propose.search.show import document, write_found, write_tried
    from parallelizer.propose.search.task import read_task
    from parallelizer.report.html.page import save
    from parallelizer.report.targets import check_targets, refuse_existing

    try:
        refuse_existing(arguments.output, force=arguments.force)
        check_targets(arguments.output, arguments.lock)
        check_targets(arguments.html, None)
        tasks = [
            read_task(
                overrides,
                within=arguments.within,
                memory=arguments.memory,
                config_dir=arguments.config_dir,
                config_name=arguments.config_name,
                front=arguments.html is not None,
                asked=arguments.top,
            )
            for overrides in _kinds(arguments.overrides, several=arguments.aim == COST)
        ]
        tried = pursue(arguments.aim, tasks, _teller())
        search, task, found = tried[0].search, tried[0].task, tried[0].found
        changes = remedies(search, task) if too_little(found) else []
    except PlanError as error:
        print_refusal(error.diagnostics, arguments.json)
        return 1
    finally:
        _clear()
    top = arguments.top or SHOWN
    command = shlex.join(["parallelizer", "search", *arguments.overrides, *_options(arguments)])
    texts = [
        search.preset(task, one.candidate, comments(found, task, at, command))
        for at, one in enumerate(found.results)
    ]
    unfit = () if found.results else (nothing(found, task, changes),)
    if arguments.json:
        print_json(
            {
                **document(found, task, texts[:top], tried, arguments.aim),
                "diagnostics": [one.as_json() for one in unfit],
            }
        )
    else:
        write_tried(tried, arguments.aim, sys.stdout)
        write_found(found, task, sys.stdout, top=top)
        show_diagnostics.write(unfit, sys.stderr)
        if top > MOST:
            sys.stderr.write(f"--top {top}: a search dry-runs at most {MOST} candidates that fit\n")
    if texts or arguments.html:
        try:
            if arguments.html:
                save(page(found, task, texts).encode("utf-8", "replace"), arguments.html)
                sys.stderr.write(f"{arguments.html}: written\n")
            if texts:
                _keep(arguments, task, found, texts[0])
                if arguments.lock:
                    _lock(arguments, search, task, texts[0])
        except PlanError as error:
            show_diagnostics.write(error.diagnostics, sys.stderr)
            return 1
    return 130 if not all(one.found.complete for one in tried) else 0 if texts else 1


def _kinds(overrides: Sequence[str], *, several: bool) -> list[list[str]]:
    """The overrides for each kind of hardware, with its price where several are given. Raises PlanError, also for several kinds
    where not `several` may be given.
    """
    kinds = _values(overrides, "hardware")
    if len(kinds) < 2:
        return [list(overrides)]
    if not several:
        message = (
            f"hardware={','.join(kinds)} names several kinds, which only a search for the least cost compares"
        )
        raise PlanError([Diagnostic("search-hardware", message, None, "add --for cost, or name one kind")])
    prices = _values(overrides, PRICE_KEY)
    if len(prices) not in (0, 1, len(kinds)):
        message = f"{PRICE_KEY} has {len(prices)} prices for {len(kinds)} kinds of hardware"
        advice = f"give one for each, as in ++{PRICE_KEY}={','.join(['2.5'] * len(kinds))}"
        raise PlanError([Diagnostic("search-price", message, None, advice)])
    found = []
    for at, kind in enumerate(kinds):
        values = {"hardware": kind, **({PRICE_KEY: prices[at]} if len(prices) > 1 else {})}
        found.append([_with(one, values) for one in overrides])
    return found


def _values(overrides: Sequence[str], key: str) -> list[str]:
    """The values that are given of a key, with commas between them."""
    given = next((one for one in overrides if one.lstrip("+").partition("=")[0] == key), "")
    return given.partition("=")[2].split(",") if given else []


def _with(override: str, values: Mapping[str, str]) -> str:
    key = override.partition("=")[0]
    return f"{key}={values[key.lstrip('+')]}" if key.lstrip("+") in values else override


def _options(arguments: argparse.Namespace) -> list[str]:
    """The options that change what is found, as they are written."""
    found = ["--config-dir", arguments.config_dir] if arguments.config_dir else []
    found += [word for limit in arguments.within for word in ("--within", limit)]
    if arguments.memory:
        found += ["--memory", _sized(arguments.memory)]
    if arguments.aim != "time":
        found += ["--for", arguments.aim]
    return found


def _sized(count: int) -> str:
    """Bytes as `--memory` takes them, in the largest unit that says them exactly."""
    units = sorted(((n, name) for name, n in UNITS.items() if name), reverse=True)
    name = next(name for n, name in units if count % n == 0)
    return f"{count // UNITS[name]}{name.replace('I', 'i')}"


def _keep(arguments: argparse.Namespace, task: SearchTask, found: SearchResult, text: str) -> None:
    """Write the best preset where the command line asks for it, or print it; and say how to run it. Raises PlanError."""
    from parallelizer.propose.search.preset import run_overrides
    from parallelizer.report.html.page import save

    if arguments.output:
        save(text.encode(), arguments.output)
        sys.stderr.write(f"{arguments.output}: written\n")
    elif not arguments.json:
        sys.stdout.write(text)
    if not arguments.json:
        words = [*task.overrides, *run_overrides(found.results[0].candidate)]
        for line in _next_steps(arguments.output, arguments.config_dir, words):
            sys.stderr.write(f"{line}\n")


def _lock(arguments: argparse.Namespace, search: Search, task: SearchTask, text: str) -> None:
    """Write the lock of the best preset: that of `plan` with it. Raises PlanError."""
    from parallelizer.report.figures import figures
    from parallelizer.report.lock import write_lock
    from parallelizer.simulate.record.trace_classes import trace_classes

    best = search.found.results[0].candidate
    setup = task.setup_of(text, best)
    program = setup.compile(search.model)
    step = trace_classes(program, search.model, setup.recipe())
    write_lock(arguments.lock, figures(program, search.model, step, setup.workload))
    sys.stderr.write(f"{arguments.lock}: written\n")


def _next_steps(output: str | None, config_dir: str | None, overrides: Sequence[str]) -> list[str]:
    """How to save the preset, if it is not, and to plan with it. Presets lie in the folder `parallel` of a configuration."""
    own = Path(config_dir or "conf", "parallel")
    target = Path(output or own / "found.yaml")
    steps = []
    if output is None:
        make = "" if target.parent.is_dir() else f"create the folder {target.parent} and "
        steps.append(
            f"save it: {make}put the preset above into {target}, or search again with --output {target}"
        )
    elif target.parent.resolve() != own.resolve() and (config_dir or target.parent.name != "parallel"):
        target = own / target.name
        steps.append(f"to use it, move it to {target}")
    run = ["plan", "--config-dir", str(target.parent.parent), *overrides, f"parallel={target.stem}"]
    return [*steps, f"{'then ' if steps else ''}plan it: parallelizer {shlex.join(run)}"]


def _teller() -> Callable[[str], None]:
    """What shows the progress: one line on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda text: print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
