"""The recipes are what a person reads once and then owns: they stand on public names alone, and are short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallelizer as pz
from parallelizer import training
from tests.recipes.runs import ROOT
from tests.test_public_names import MADE

RECIPES = sorted((ROOT / "recipes").glob("*.py"))
VARIABLES = {
    "batches": "Batches", "checkpoints": "RunCheckpoints", "guards": "Guards", "report": "Reporting",
    "sampler": "Sampler", "stream": "TextStream", "text": "TextLogits",
}  # fmt: skip
"""What a job has made, by the names that the recipes have for it."""


def attributes(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr


def test_these_are_the_recipes() -> None:
    assert [path.name for path in RECIPES] == ["generate.py", "own_data.py", "train.py"]
    assert 60 <= len((ROOT / "recipes/train.py").read_text().splitlines()) <= 120


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_imports_the_package_and_training_and_nothing_else_of_ours(path: Path) -> None:
    ours = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(word in ast.unparse(node) for word in ("parallelizer", "recipes", "tests"))
    ]
    assert ours == ["import parallelizer as pz", "from parallelizer import training"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_names_what_is_public(path: Path) -> None:
    for name, attribute in attributes(path):
        if name == "pz":
            assert attribute in pz.__all__
        elif name == "training":
            assert attribute in training.__all__
        elif name in VARIABLES:
            assert attribute in MADE[VARIABLES[name]], (name, attribute)
        assert not attribute.startswith("_") or name == "self", (name, attribute)


@pytest.mark.parametrize("module", ["recipes.train", "recipes.generate", "parallelizer.training"])
def test_importing_it_takes_no_time(module: str) -> None:
    """So Ctrl-C is handled from the beginning: what is slow is imported by `training.run`."""
    slow = "[m for m in ('torch', 'hydra', 'omegaconf', 'numpy') if m in sys.modules]"
    code = f"import sys, {module}; print({slow})"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
