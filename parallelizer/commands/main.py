"""The command line: `python -m parallelizer COMMAND [overrides]`, with the same overrides as the recipe.

Exit status 0: fine. 1: the configuration is wrong, diagnostics printed. 2: the command line does not parse.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from parallelizer.commands import init as init_command
from parallelizer.commands import verify as verify_command
from parallelizer.commands.import_torch import import_torch
from parallelizer.commands.unknown_words import Parser, refuse_options
from parallelizer.configuration.override_mistakes import OverrideSyntaxError, override_span
from parallelizer.diagnostics import interrupts
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, has_errors

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.configuration.setup import Setup
    from parallelizer.simulate.record.trace import Trace
    from parallelizer.styles.application import Program


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    arguments = _parse(argv)
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


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; overrides may stand before, between and behind the options."""
    parser, commands = _parser()
    arguments, rest = parser.parse_known_args(argv)
    refuse_options(rest, arguments.command, commands)
    arguments.overrides += rest
    return arguments


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of the commands by name."""
    parser = Parser("parallelizer", description="Parallelism for PyTorch models as data.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run, doc in (
        ("validate", _validate, "find every mistake in the plan and the configuration"),
        ("plan", _plan, "print what each rank holds, sends and needs"),
        ("verify", _verify, "prove that the sharded run equals the unsharded one"),
        ("export", _export, "print the plan as plain Python on torch's public APIs"),
        ("import-plan", _import_plan, "print the plan that a transformers model's own tp_plan comes to"),
        ("schema", _schema, "print the JSON Schema of plan files, for editors"),
        ("init", _init, "propose a plan for a model that has none, from what its forward does"),
    ):
        command = commands.add_parser(name, help=doc, description=doc + ".")
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="Hydra overrides, as for the recipe"
        )
        command.add_argument(
            "--config-dir",
            metavar="DIR",
            help="a folder of one's own configuration, searched before the shipped one",
        )
        command.add_argument(
            "--config-name", metavar="NAME", default="train", help="the root configuration (train)"
        )
        if name == "schema":
            command.add_argument("--preset", action="store_true", help="the schema of presets instead")
        if name == "import-plan":
            command.add_argument(
                "--check",
                metavar="FILE",
                help="compare a plan with what would be written now: exit 1 with what differs",
            )
        if name not in ("export", "import-plan", "schema", "init"):
            command.add_argument(
                "--json", action="store_true", help="one JSON document on stdout, nothing else"
            )
        if name == "validate":
            command.add_argument(
                "--quick",
                action="store_true",
                help="stop before a model is built; with paths of plan files, read these alone",
            )
        if name == "plan":
            command.add_argument("--rank", type=int, default=0, help="whose shards to show (0)")
            exclusive = command.add_mutually_exclusive_group()
            exclusive.add_argument(
                "--lock", metavar="FILE", help="write shards, collectives and memory as text to be committed"
            )
            exclusive.add_argument(
                "--locked", metavar="FILE", help="compare with such a file: exit 1 with what differs"
            )
            exclusive.add_argument(
                "--diff",
                nargs=2,
                metavar=("A", "B"),
                help="what changes between two presets, plans or sets of overrides",
            )
            command.add_argument(
                "--html", metavar="FILE", help="write all of it as one page for a browser too"
            )
        if name == "verify":
            verify_command.add_options(command)
        if name == "init":
            init_command.add_options(command)
        command.set_defaults(run=run)
    _add_explain(commands)
    _add_new(commands)
    doc = "say what is here and what works: to paste into an issue"
    command = commands.add_parser("doctor", help=doc, description=doc + ".")
    command.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    command.set_defaults(run=_doctor, overrides=[])
    return parser, commands.choices


def _add_explain(commands: Any) -> None:
    """`explain` takes a code, a path, or nothing; a path is explained in a configuration."""
    doc = "say what a diagnostic's code means, or which rules stand on a module or parameter"
    command = commands.add_parser("explain", help=doc, description=doc + ".")
    command.add_argument("word", nargs="?", metavar="CODE|PATH", help="without one, every code in one line")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides, for a path")
    command.add_argument("--config-dir", metavar="DIR", help="as for the other commands")
    command.add_argument("--config-name", metavar="NAME", default="train", help="as for the other commands")
    command.add_argument("--rank", type=int, default=0, help="whose shards to show (0)")
    command.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    command.set_defaults(run=_explain)


def _add_new(commands: Any) -> None:
    doc = "copy the training recipe and a small configuration into a folder, to start from"
    command = commands.add_parser("new", help=doc, description=doc + ".")
    command.add_argument("folder", metavar="DIR", help="a new folder, or one that has none of the files")
    command.set_defaults(run=_new, overrides=[])


def _new(arguments: argparse.Namespace) -> int:
    from parallelizer.commands.new import command as new

    if arguments.overrides:
        message = f"new takes one folder, and here stands {arguments.overrides[0]} too"
        raise OverrideSyntaxError(
            Diagnostic("override-syntax", message, override_span(arguments.overrides[0]))
        )
    try:
        return new.run(arguments.folder)
    except PlanError as error:
        show_diagnostics.write(error.diagnostics, sys.stderr)
        return 1


def _validate(arguments: argparse.Namespace) -> int:
    if arguments.quick:
        from parallelizer.commands import validate_files as quick

        return quick.run(arguments, lambda: _setup(arguments))
    import_torch()
    from parallelizer.configuration.validate import validate
    from parallelizer.report.documents import validate_document

    setup: Setup | None = None
    try:
        setup = _setup(arguments)
        found = validate(setup)
    except PlanError as error:
        found = error.diagnostics
    if arguments.json:
        _print_json(validate_document(found))
    else:
        show_diagnostics.write(found, sys.stderr)
        if setup is not None and not has_errors(found):
            unfollowed = any(d.code == "trace-failed" for d in found)
            verdict = (
                "no mistake found, but the step did not run and was not followed" if unfollowed else "valid"
            )
            print(f"{setup.plan.file} on {setup.mesh}: {verdict}")
    return 1 if has_errors(found) else 0


def _plan(arguments: argparse.Namespace) -> int:
    import_torch()
    from parallelizer.configuration.validate import validated
    from parallelizer.report.diff import check_rank
    from parallelizer.report.documents import plan_document
    from parallelizer.report.lock import read_lock
    from parallelizer.report.targets import check_targets
    from parallelizer.report.text import dry_run

    if arguments.diff:
        return _diff(arguments)
    try:
        check_targets(arguments.html, arguments.lock)
        if arguments.locked:
            read_lock(arguments.locked)
        setup = _setup(arguments)
        model = setup.build_model()
        program = setup.compile(model)
        check_rank(arguments.rank, setup.mesh)
    except PlanError as error:
        return _refuse(arguments, error.diagnostics)
    validation = validated(setup, program, model, rank=arguments.rank, classes=True)
    step, found = validation.trace, validation.found
    if arguments.html:
        from parallelizer.report.html import page as show_html

        try:
            show_html.write(program, model, step, arguments.html, device=setup.device, hardware=setup.hardware,
                            diagnostics=found, rank=arguments.rank)  # fmt: skip
        except PlanError as error:
            found += error.diagnostics
    differing: list[str] = []
    if arguments.lock or arguments.locked:
        try:
            differing = _lock(arguments, setup, program, model, step)
        except PlanError as error:
            found += error.diagnostics
    status = 1 if has_errors(found) or differing else 0
    if arguments.json:
        document = plan_document(program, model, setup.device, arguments.rank, step, found)
        _print_json({**document, "differences": differing} if arguments.locked else document)
        return status
    if arguments.lock or arguments.locked:
        show_diagnostics.write(found, sys.stderr)
        _say_locked(arguments, found, differing)
        return status
    dry_run.write(setup, program, model, step, found, arguments.rank)
    return status


def _refuse(arguments: argparse.Namespace, found: tuple[Diagnostic, ...]) -> int:
    """Print why there is nothing to show, in the form that was asked for; the exit status."""
    from parallelizer.report.documents import refusal_document

    if arguments.json:
        _print_json(refusal_document(found))
    else:
        show_diagnostics.write(found, sys.stderr)
    return 1


def _lock(
    arguments: argparse.Namespace, setup: Setup, program: Program, model: nn.Module, step: Trace | None
) -> list[str]:
    """Write or compare a lock; what differs, in words. Raises PlanError when there is nothing to lock, or no
    lock.
    """
    from parallelizer.report import lock
    from parallelizer.report.figures import figures

    if step is None:
        raise PlanError(
            [Diagnostic("lock-incomplete", "the step cannot be traced, so that there is nothing to lock")]
        )
    now = figures(program, model, step, setup.workload)
    if arguments.lock:
        lock.write_lock(arguments.lock, now)
        return []
    return lock.check_lock(arguments.locked, now)


def _say_locked(arguments: argparse.Namespace, found: tuple[Diagnostic, ...], differing: list[str]) -> None:
    from parallelizer.report import lock

    if differing:
        print(lock.report(arguments.locked, differing))
    elif not has_errors(found):
        print(f"{arguments.lock}: written" if arguments.lock else f"as locked in {arguments.locked}")


def _diff(arguments: argparse.Namespace) -> int:
    from parallelizer.report import diff

    names = arguments.diff
    try:
        one, other = (
            diff.of_overrides(
                [*arguments.overrides, *diff.side(name, arguments.config_dir)],
                arguments.config_dir,
                arguments.config_name,
                arguments.rank,
            )
            for name in names
        )
    except PlanError as error:
        return _refuse(arguments, error.diagnostics)
    if arguments.json:
        _print_json(diff.document(one, other, names))
    else:
        diff.write(one, other, names, sys.stdout)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    import_torch()
    from parallelizer.compiler.observe.module_calls import observe
    from parallelizer.report.export.export import export

    try:
        setup = _setup(arguments)
        model = setup.build_model()
        program = setup.compile(model)
        folder = ["--config-dir", arguments.config_dir] if arguments.config_dir else []
        command = shlex.join(["python", "-m", "parallelizer", "export", *folder, *arguments.overrides])
        code = export(program, model, observe(model, setup.workload), command)
    except PlanError as error:
        show_diagnostics.write(error.diagnostics, sys.stderr)
        return 1
    show_diagnostics.write(program.diagnostics, sys.stderr)
    sys.stdout.write(code)
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    """A registered code is explained as one; any other word is the path of a module or parameter."""
    from parallelizer.commands.explain import codes

    if arguments.word is None or codes.is_code(arguments.word):
        if arguments.json:
            _print_json(codes.document(arguments.word))
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
        setup = _setup(arguments)
        check_rank(arguments.rank, setup.mesh)
        if arguments.json:
            answer = explain(setup, arguments.word, arguments.rank)
            _print_json(explain_document(answer))
        else:
            answer = show_explain.explain_path(setup, arguments.word, sys.stdout, rank=arguments.rank)
            sys.stdout.flush()
            show_diagnostics.write((d for d in answer.diagnostics if d.severity == "error"), sys.stderr)
    except PlanError as error:
        found = error.diagnostics
        no_path = any(d.code == "unknown-path" and "did you mean" not in (d.help or "") for d in found)
        if no_path and codes.nearest_codes(arguments.word):
            found = (codes.unknown(arguments.word),)
        return _refuse(arguments, found)
    return 1 if has_errors(answer.diagnostics) else 0


def _verify(arguments: argparse.Namespace) -> int:
    return verify_command.run(arguments, lambda: _setup(arguments))


def _import_plan(arguments: argparse.Namespace) -> int:
    import_torch()
    from parallelizer.commands import import_plan

    return import_plan.run(arguments, lambda: _setup(arguments, planless=True))


def _init(arguments: argparse.Namespace) -> int:
    import_torch()
    return init_command.run(arguments, lambda more: _setup(arguments, more))


def _doctor(arguments: argparse.Namespace) -> int:
    from parallelizer.commands.doctor import command as doctor

    if arguments.overrides:
        sys.stderr.write("parallelizer doctor: error: it looks at the machine, and takes no overrides\n")
        return 2
    return doctor.run(arguments.json)


def _schema(arguments: argparse.Namespace) -> int:
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
    _print_json(preset_schema(STYLES) if arguments.preset else plan_schema(STYLES))
    return 0


def _setup(arguments: argparse.Namespace, more: Sequence[str] = (), *, planless: bool = False) -> Setup:
    from parallelizer.configuration.compose import compose_config
    from parallelizer.configuration.read_setup import from_config

    composed = compose_config([*arguments.overrides, *more], arguments.config_dir, arguments.config_name)
    return from_config(*composed, planless=planless)


def _print_json(document: dict[str, Any]) -> None:
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")
