"""A recipe as a command: how it was typed, whose configuration it finds, and how another process finds it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parallelizer.training.job.recipe_file import RecipeFile, recipe_of
from recipes.train import train


def test_it_is_told_as_it_is_typed() -> None:
    assert recipe_of(train, "train").typed(["parallel=tp2", "a b"]) == "-m recipes.train parallel=tp2 'a b'"
    assert RecipeFile(Path("recipes/train.py")).typed(["x=1"]) == "recipes/train.py x=1"


@pytest.mark.parametrize("beside", ["mine/conf", "mine/recipes/conf"])
def test_the_folder_conf_beside_it_is_searched_behind_a_given_one(beside: str, tmp_path: Path) -> None:
    recipe = RecipeFile(tmp_path / "mine" / "recipes" / "train.py")
    assert recipe.folders(["train.py", "parallel=tp2"]) == []
    (tmp_path / beside).mkdir(parents=True)
    assert recipe.folders(["train.py", "parallel=tp2"]) == [str(tmp_path / beside)]
    assert recipe.folders(["train.py", "--config-dir", "own"]) == ["own", str(tmp_path / beside)]


def test_its_root_configuration_is_the_one_that_it_takes_unless_the_command_names_another() -> None:
    recipe = RecipeFile(Path("generate.py"), None, "generate")
    assert recipe.words(["generate.py", "a=1"]).config_name == "generate"
    words = recipe.words(["generate.py", "-cn", "mine", "a=1"])
    assert (words.config_name, words.rest) == ("mine", ["a=1"])


PICKLED = """
from __future__ import annotations

import pickle
import sys

import helper
from parallelizer.training.job.recipe_file import recipe_of
from parallelizer.training.job.run import HydraTask


def train(job):
    pass


if __name__ == "__main__":
    task = pickle.loads(pickle.dumps(HydraTask(train, recipe_of(train, "train"))))
    print(task.train.__module__, task.train.__name__, task.recipe.typed([]), helper.HERE)
"""


def test_another_process_imports_it_from_its_module(tmp_path: Path) -> None:
    """Slurm's tasks do: what is in `__main__` would be pickled with all that it refers to."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text(PICKLED)
    (tmp_path / "helper.py").write_text("HERE = 'found'\n")
    ran = subprocess.run(
        [sys.executable, "-m", "mine.train"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "mine.train train -m mine.train found\n", ran.stderr


SCRIPT = """
from parallelizer.training.job.recipe_file import recipe_of

def train(job):
    pass

recipe = recipe_of(train, "train")
import helper
print(recipe.module, helper.HERE)
"""


def test_a_script_finds_the_modules_beside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("HERE = 'found'\n")
    ran = subprocess.run(
        [sys.executable, "recipes/train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "None found\n", ran.stderr
