"""Run an example of a code: lay its files out, and find what `validate` (or `plan`) finds in them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from parallelizer.codes.declare import Example
from parallelizer.diagnostics import Diagnostic, PlanError, in_order

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from parallelizer.origins import Origins


@contextmanager
def found(example: Example) -> Iterator[tuple[Diagnostic, ...]]:
    """What is found in the example, in order. While it is open its files lie in the working directory.

    Changes the working directory and the import path of this process until it is closed.
    """
    with _laid_out(example):
        yield in_order(_findings(example))


def shipped(text: str) -> str:
    """A text in which the shipped configuration is called `configs/`, wherever it lies on this machine."""
    from parallelizer.config import config_folder

    return text.replace(f"{config_folder()}{os.sep}", "configs/")


def _findings(example: Example) -> Sequence[Diagnostic]:
    from parallelizer.checks.idle_rules import idle_rules
    from parallelizer.compose import OverrideSyntaxError
    from parallelizer.config import from_config

    overrides = (*(["plan=plan.yaml"] if example.plan else []), *example.overrides)
    # What composes is remembered only where no file of the example can have a part in it.
    composed = _composed.__wrapped__ if example.config_dir else _composed
    try:
        setup = from_config(*composed(overrides, example.config_dir))
        model = setup.build_model()
        program = setup.compile(model)
    except PlanError as error:
        return error.diagnostics
    except OverrideSyntaxError as error:
        return [error.diagnostic]
    if example.followed:
        import torch

        from parallelizer.checks.layout_flow import check_layout_flow

        torch.set_num_threads(1)  # it forks, and an OpenMP region before a fork hangs the child
        return (*program.diagnostics, *check_layout_flow(setup, program, model))
    if not example.traced:
        return (*program.diagnostics, *idle_rules(program))
    from parallelizer.show.dry_run import trace_step

    return trace_step(setup, program, model)[1]


@lru_cache(maxsize=64)
def _composed(overrides: tuple[str, ...], config_dir: str | None) -> tuple[DictConfig, Origins]:
    from parallelizer.compose import compose_config

    return compose_config(overrides, config_dir)


@contextmanager
def _laid_out(example: Example) -> Iterator[None]:
    before, path, modules = os.getcwd(), list(sys.path), set(sys.modules)
    with tempfile.TemporaryDirectory(prefix="parallelizer-example-") as folder:
        for name, text in example.laid_out.items():
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
