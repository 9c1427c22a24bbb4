"""Run the example of a code: lay its files out, and find what its command, `validate` or `plan`, finds in them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from omegaconf import DictConfig

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.origins import Origins
from parallelizer.configuration.override_mistakes import OverrideSyntaxError
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.validate import validated
from parallelizer.diagnostics.codes.section import Code, Example
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, in_order
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.diagnostics.render import render

WIDTH = 80
"""Columns of the output in a section: those of the narrowest terminal that is common."""


@dataclass(frozen=True)
class Ran:
    """What was found in an example, how its own findings are printed, and whether what they mark is there."""

    diagnostics: tuple[Diagnostic, ...]
    output: str
    points: bool


def run(code: Code) -> Ran:
    """What is found in a code's example."""
    with found(code.example) as diagnostics:
        own = [d for d in diagnostics if d.code == code.name]
        output = "\n\n".join(shipped(render(d, width=WIDTH)) for d in own)
        return Ran(diagnostics, output, all(map(points_at_something, own)))


@contextmanager
def found(example: Example) -> Iterator[tuple[Diagnostic, ...]]:
    """What is found in the example, in order. While it is open its files lie in the working directory.

    Changes the working directory and the import path of this process until it is closed.
    """
    with _laid_out(example):
        yield in_order(_findings(example))


def shipped(text: str) -> str:
    """A text in which the shipped configuration is called `configs/`, wherever it lies on this machine."""
    return text.replace(f"{config_folder()}{os.sep}", "configs/")


def points_at_something(found: Diagnostic) -> bool:
    """Whether the characters that a finding marks are there, in its file or in its override."""
    span = found.span
    if span is None:
        return False
    if span.file.startswith("<override "):
        lines = [span.file.removeprefix("<override ").removesuffix(">")]
    else:
        lines = Path(span.file).read_text().split("\n")
    # A file as a whole has no columns.
    return len(lines[span.line - 1]) + 1 >= span.column and span.end_column >= span.column


def _findings(example: Example) -> Sequence[Diagnostic]:
    # What composes is remembered only where no file of the example can have a part in it.
    composed = _composed.__wrapped__ if example.config_dir else _composed
    try:
        setup = from_config(*composed(tuple(example.overrides), example.config_dir))
        model = setup.build_model()
        return validated(setup, setup.compile(model), model).found
    except PlanError as error:
        return error.diagnostics
    except OverrideSyntaxError as error:
        return [error.diagnostic]


@lru_cache(maxsize=64)
def _composed(overrides: tuple[str, ...], config_dir: str | None) -> tuple[DictConfig, Origins]:
    return compose_config(overrides, config_dir)


@contextmanager
def _laid_out(example: Example) -> Iterator[None]:
    before, path, modules = os.getcwd(), list(sys.path), set(sys.modules)
    with tempfile.TemporaryDirectory(prefix="parallelizer-example-") as folder:
        for name, text in example.written_out.items():
            file = Path(folder, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        os.chdir(folder)
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            os.chdir(before)
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
                    del sys.modules[name]
