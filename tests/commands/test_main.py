"""`python -m parallelizer`: what it prints, where, and the status it ends with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallelizer.commands import schema
from parallelizer.commands.main import COMMANDS, main, make_parser
from tests.recipes.runs import ROOT, command

Captured = pytest.CaptureFixture[str]

SETUP = ["overrides", "--config-dir", "--config-name"]
EXPECTED = {
    "validate": (
        "find all mistakes in the plan and the configuration",
        [*SETUP, "--json", "--quick", "--proven", "--no-proof", "--proofs"],
    ),
    "plan": (
        "print the shards, collectives and memory of each rank",
        [*SETUP, "--json", "--rank", "--lock", "--locked", "--diff", "--html"],
    ),
    "search": (
        "find the fastest mesh and options for a number of GPUs, as a preset",
        [
            *SETUP,
            "--json",
            "--within",
            "--memory",
            "--for",
            "--top",
            "--output",
            "--force",
            "--lock",
            "--html",
        ],
    ),
    "verify": (
        "prove that the sharded run equals the unsharded one",
        [*SETUP, "--json", "--full-mesh", "--force", "--dtype", "--proofs", "--seed"],
    ),
    "rehearse": (
        "run one rank of any mesh on this machine's device, without its peers",
        [*SETUP, "--json", "--rank", "--steps", "--html"],
    ),
    "train": ("train under a plan, with the unchanged recipe that `new` copies", ["overrides"]),
    "generate": ("sample text from a checkpoint, with the unchanged recipe that `new` copies", ["overrides"]),
    "export": ("print the plan as plain Python on torch's public APIs", SETUP),
    "import-plan": ("convert a transformers model's own tp_plan to a plan", [*SETUP, "--check"]),
    "schema": ("print the JSON Schema of plan files, for editors", [*SETUP, "--preset"]),
    "init": (
        "propose a plan for a model without one, from the operations of its forward",
        [*SETUP, "--output", "--force", "--unproven", "--seconds"],
    ),
    "explain": (
        "print the meaning of a code, or the rules that apply to a module or parameter",
        ["word", *SETUP, "--rank", "--json"],
    ),
    "new": ("copy the training recipe and a small configuration into a folder", ["folder"]),
    "doctor": ("print the installed versions and the features that work, for a bug report", ["--json"]),
}
"""The line of each command in `--help`, and the options in its own help; in the order of `--help`."""


def test_the_commands_are_in_the_order_of_help_with_their_lines(capsys: Captured) -> None:
    assert [command.NAME for command in COMMANDS] == list(EXPECTED)
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    listed = " ".join(f"{name} {line}" for name, (line, _) in EXPECTED.items())
    assert ended.value.code == 0 and f" COMMAND {listed} " in f"{told} "


@pytest.mark.parametrize("name", EXPECTED)
def test_a_command_has_its_options(name: str) -> None:
    own = make_parser(COMMANDS)[1][name]
    line, options = EXPECTED[name]
    assert own.description == f"{line}."
    assert [a.option_strings[-1] if a.option_strings else a.dest for a in own._actions[1:]] == options
    assert all(action.help for action in own._actions)


def test_every_module_with_a_name_is_listed() -> None:
    folder = ROOT / "parallelizer" / "commands"
    named = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if "starter" not in path.parts and "\nNAME = " in path.read_text()
    }
    assert {getattr(command, "__name__", "") for command in COMMANDS} == named


@pytest.mark.parametrize("missing", ["NAME", "DOC", "add_options", "run"])
def test_a_module_without_what_a_command_has_cannot_be_listed(missing: str) -> None:
    whole = {name: getattr(schema, name) for name in ("NAME", "DOC", "add_options", "run")}
    listed: Any = SimpleNamespace(**whole)
    assert list(make_parser([listed])[1]) == ["schema"]
    delattr(listed, missing)
    with pytest.raises(AttributeError, match=missing):
        make_parser([listed])


def test_making_the_parser_imports_nothing_slow() -> None:
    code = (
        "import sys; from parallelizer.commands.main import COMMANDS, make_parser; make_parser(COMMANDS); "
        "print(sorted({'torch', 'numpy', 'hydra', 'omegaconf', 'rich', 'parallelizer.child.children'} & {*sys.modules}))"
    )
    assert command("-c", code, cwd=ROOT).out == "[]\n"


def test_overrides_stand_anywhere(capsys: Captured) -> None:
    assert main(["validate", "parallel=tp2", "--json", "train.seq_len=255"]) == 1
    assert json.loads(capsys.readouterr().out)["valid"] is False


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["validate", "--nothing"], ["plan", "--rank=x"], ["plan", "parallel=[tp2"]]
)
def test_a_command_line_that_does_not_parse(arguments: list[str], capsys: Captured) -> None:
    try:
        status = main(arguments)
    except SystemExit as end:  # as argparse ends
        status = end.code  # type: ignore[assignment]
    assert status == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "error" in printed.err and "Traceback" not in printed.err


def test_a_model_is_found_in_the_working_directory(tmp_path: Path) -> None:
    """And the command runs as people type it."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\nclass Mine(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Embedding(256, 8), nn.Linear(8, 256))\n"
    )
    (tmp_path / "plan.yaml").write_text('version: 1\nrules:\n  "": fsdp\n')
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(
        "_target_: mine.Mine\nplan: ./plan.yaml\nloss: parallelizer.losses.cross_entropy\n"
        "batch: {input: {shape: [batch, sequence]}, labels: {shape: [batch, sequence]}}\n"
    )
    arguments = ["--config-dir", "conf", "model=mine", "parallel=fsdp2"]
    ended = command("-m", "parallelizer", "validate", "--no-proof", *arguments, cwd=tmp_path)
    assert ended.status == 0, ended.err
    assert ended.out.endswith("plan.yaml on dp_shard=2: valid\n")


@pytest.mark.parametrize(
    "words",
    [
        ("parallelizer", "explain", "layers.0.attention.wq", "parallel=tp2"),
        ("recipes.train", "dry_run=true", "parallel=tp22"),
    ],
)
def test_a_reader_who_has_gone_ends_a_command_quietly(words: tuple[str, ...], tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(tmp_path / "err", "w+") as err:
        refused = "parallel=tp22" in words  # which is said on stderr
        ended = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            stdout=write,
            stderr=write if refused else err,
            check=False,
        )
        os.close(write)
        err.seek(0)
        assert ended.returncode == 141 and err.read() == ""
