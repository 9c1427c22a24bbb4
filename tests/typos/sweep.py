"""Checks every misspelt plan as `validate` does, on a model and a mesh where every rule has something to do."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from parallelizer.commands.main import main
from parallelizer.compiler.compile import compile as compile_plan
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, has_errors
from parallelizer.language.load import load_plan
from tests.typos.edits import Typo, typos
from tests.typos.words import words_of

ROOT = Path(__file__).resolve().parents[2]

PRESET = "fsdp2_cp2_tp2"
"""The mesh that plans are checked on: every axis that they speak of is above 1."""

_YAML = {
    "yaml-syntax",
    "yaml-tag",
    "yaml-retyped",
    "unquoted-glob",
    "duplicate-key",
    "interpolation",
    "not-data",
}
RIGHT: dict[str, set[str]] = {
    "glob": {
        "unmatched-glob",
        "unmatched-alternative",
        "bad-glob",
        "style-on-parameter",
        "style-module",
        "left-out",
    },
    "style": {"unknown-style", "missing-style"},
    "axis": {"unknown-axis", "unknown-key"},
    "option": {"unknown-option", "missing-style", "missing-option"},
    "section": {"unknown-key", "no-rules", "wrong-type"},
    "layout name": {"unknown-layout", "bad-layout-name"},
    "placement": {"unknown-placement", "unknown-layout"},
    "option's value": {"unknown-placement", "unknown-layout", "unknown-value", "wrong-type"},
    "input or parameter": {"unknown-input", "unknown-parameter", "wrong-type"},
    "buffer": {"unknown-buffer", "unmatched-buffer", "unmatched-glob", "bad-glob"},
    "buffer's dimension": {"wrong-type", "unknown-dim"},
    "padding": {"wrong-type", "padding-counts"},
    "plan's name": {"plan-not-found", "extends-outside", "wrong-type"},
    "version": {"plan-version"},
}
"""The codes that name the problem, by the kind of the word. A typo may spoil the YAML itself: those codes are right
for every kind.
"""


@dataclass(frozen=True)
class Result:
    """What `validate` said of a typo.

    `caught` is right (the code, at the line), code (at the line, another code), elsewhere (at another line),
    warned (not refused, but warned of there) or survived; `same` tells that a survivor compiles to what the plan meant.
    """

    file: str
    typo: Typo
    caught: str
    codes: tuple[str, ...]
    same: bool = False


def shipped() -> list[Path]:
    """Every shipped plan, and the preset that the plans are checked on, for its axes."""
    return [
        *sorted((ROOT / "configs" / "plans").glob("*.yaml")),
        ROOT / "configs" / "parallel" / f"{PRESET}.yaml",
    ]


def sweep(files: Iterable[Path], seed: int, draws: int, most: int | None = None) -> Iterator[Result]:
    """Check every typo in some files, or `most` of them drawn by the seed."""
    every = [
        (path, typo)
        for path in files
        for word in words_of(path)
        for typo in typos(word, path.stem, seed, draws)
    ]
    if most is not None and most < len(every):
        every = random.Random(seed).sample(every, most)
    with tempfile.TemporaryDirectory() as name:
        for path, typo in every:
            yield check(path, typo, Path(name))


def check(path: Path, typo: Typo, folder: Path) -> Result:
    """Write a file with a typo, and validate it."""
    spoilt = typo.in_text(path.read_text())
    if path.parent.name == "parallel":
        (folder / "parallel").mkdir(exist_ok=True)
        file = folder / "parallel" / "typo.yaml"
        file.write_text(spoilt)
        found = _validate(["--config-dir", str(folder), "parallel=typo"])
        return Result(path.stem, typo, *_verdict(found, file, typo))
    file = folder / f"{path.stem}.yaml"
    file.write_text(spoilt)
    setup, model = _setup(path.stem)
    same = False
    try:
        program = compile_plan(
            load_plan(file), model, setup.mesh, workload=setup.workload, defaults=setup.defaults
        )
        found = program.diagnostics
        same = _meaning(program) == _meant(path.stem)
    except PlanError as error:
        found = error.diagnostics
    if not has_errors(found):  # all the rest of what `validate` does
        found = _validate([f"plan={file}", *_overrides(path.stem)])
    return Result(path.stem, typo, *_verdict(found, file, typo), same=same)


def _verdict(found: Iterable[Diagnostic], file: Path, typo: Typo) -> tuple[str, tuple[str, ...]]:
    found = list(found)
    errors = [d for d in found if d.severity == "error"]
    codes = tuple(dict.fromkeys(d.code for d in errors))
    here = {
        d.code
        for d in errors
        if d.span and Path(d.span.file).name == file.name and d.span.line == typo.word.line + 1
    }
    if here & (RIGHT[typo.word.kind] | _YAML):
        return "right", codes
    if not errors:
        warned = {
            d.code for d in found if d.severity == "warning" and d.span and d.span.line == typo.word.line + 1
        }
        return "warned" if warned & RIGHT[typo.word.kind] else "survived", codes
    return "code" if here else "elsewhere", codes


def _validate(arguments: list[str]) -> tuple[Diagnostic, ...]:
    """Every finding of the command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["validate", "--no-proof", "--json", *arguments])
    return tuple(map(_diagnostic, json.loads(out.getvalue())["diagnostics"]))


def _diagnostic(said: dict[str, Any]) -> Diagnostic:
    from parallelizer.diagnostics.diagnostic import Span

    span = Span(**said["span"]) if said["span"] else None
    return Diagnostic(said["code"], said["message"], span, said["help"], said["severity"])


def _overrides(plan: str) -> list[str]:
    """A model that the plan is for, as small as there is, and the mesh."""
    models = sorted(
        (ROOT / "configs" / "model").glob("*.yaml"), key=lambda path: ("debug" not in path.stem, path.stem)
    )
    named = {path.stem: yaml.safe_load(path.read_text()).get("plan") for path in models}
    model = next((stem for stem, its in named.items() if plan in (its, stem)), models[0].stem)
    return [f"model={model}", f"parallel={PRESET}", "device=cpu"]


@lru_cache
def _setup(plan: str) -> tuple[Setup, Any]:
    setup = from_config(*compose_config([f"plan={plan}", *_overrides(plan)]))
    return setup, setup.build_model()


@lru_cache
def _meant(plan: str) -> object:
    setup, model = _setup(plan)
    return _meaning(setup.compile(model))


def _meaning(program: Any) -> object:
    """What a program does, without where it is written."""
    applications = [
        re.sub(
            r"span=Span\([^)]*\)",
            "",
            repr((a.module, a.slot, a.style, a.axes, sorted(a.options.items()), a.params)),
        )
        for a in program
    ]
    plan = program.plan
    buffers = {
        n: (b.dim, b.make, b.pad, b.documents) for n, b in (*plan.batch.items(), *plan.buffers.items())
    }
    return sorted(applications), buffers
