"""Whether a command that a page shows could run: its words are looked at, and nothing is started."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from parallelizer.commands import main as cli
from parallelizer.configuration.compose import compose_config
from parallelizer.diagnostics.package_folder import config_folder

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {"recipes.train": "train", "recipes.generate": "generate"}
"""What composes a configuration, and its root."""

COMPOSED: set[tuple[str, str, str]] = set()
"""Keys that a configuration has had already, with its root and its model."""
GROUPS = ("model", "data", "plan", "parallel", "optim", "hardware")


def check(command: str) -> None:
    """Fail the test where the command names something that there is not: a module, a subcommand, a flag, a key, a
    preset, a target, a file, an extra.
    """
    words = shlex.split(re.split(r" (?:\||>>?|&&|2>) ", command)[0], comments=True)
    match words:
        case ["parallelizer", *rest] | ["python", "-m", "parallelizer", *rest]:
            check_package(rest)
        case ["python", "-m", module, *rest] if module in RECIPES:
            check_recipe(module, rest)
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module) is not None, f"there is no module {module}"
        case ["python", file, *_] if "/" in file:
            assert (ROOT / file).exists(), f"there is no {file}"
        case ["make", *targets]:
            made = (ROOT / "Makefile").read_text()
            for target in targets:
                assert re.search(rf"^{target}:", made, re.M), f"make has no target {target}"
        case ["pip", "install", *wanted]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for one in wanted:
                for extra in re.findall(r"[\w-]+", (re.findall(r"parallelizer\[(.*?)\]", one) or [""])[0]):
                    assert extra in extras, f"there is no extra {extra}"
        case ["torchrun" | "srun", *rest]:
            for module in RECIPES:
                if module in rest:
                    check_recipe(module, rest[rest.index(module) + 1 :])
        case _:
            pass


def check_package(words: Sequence[str]) -> None:
    """A command of the package: its name, its flags, its overrides."""
    try:
        arguments = cli.parse(list(words))
    except SystemExit as end:
        if end.code:
            pytest.fail(f"parallelizer {shlex.join(words)} does not parse")
        return
    check_overrides([word for word in getattr(arguments, "overrides", []) if "=" in word])


def check_recipe(module: str, words: Sequence[str]) -> None:
    """A command of the recipe: whether its overrides compose."""
    assert importlib.util.find_spec(module) is not None, f"there is no module {module}"
    kept = [word for i, word in enumerate(words) if "=" in word and not words[i - 1].startswith("--config")]
    if module == "recipes.generate":  # a prompt and a path are taken as they stand
        kept = [word for word in kept if not word.startswith(("prompt=", "checkpoint="))]
    check_overrides(kept, RECIPES[module])


def check_overrides(overrides: Sequence[str], root: str = "train") -> None:
    """Whether Hydra takes them, and the configuration has their keys. What belongs to a model, a plan or data of
    one's own, or to a launcher's plugin, is left out; of a sweep, each first value is taken.
    """
    parsed = OverridesParser.create().parse_overrides([o for o in overrides if "..." not in o])
    wanted = []
    own = False
    for override in parsed:
        key, text = override.key_or_group, override.input_line or ""
        if key in GROUPS and key != "plan":
            first = (
                str(override.value()).split(",")[0].strip("'\" []")
                if not override.is_sweep_override()
                else None
            )
            if first is not None and not (config_folder() / key / f"{first}.yaml").exists():
                assert key not in ("parallel", "hardware", "optim"), f"there is no {key}={first}"
                own = own or key == "model"
                continue
        if key == "plan" or override.is_sweep_override() or key.startswith(("hydra", "imports")):
            continue
        wanted.append((key, text))
    kept = [text for key, text in wanted if not (own and key.startswith("model."))]
    keys = {(root, kept_model(kept), text.split("=")[0]) for text in kept}
    if keys <= COMPOSED:  # what has been taken once: composing costs a fifth of a second
        return
    compose_config(kept, config_name=root)
    COMPOSED.update(keys)


def kept_model(overrides: Sequence[str]) -> str:
    """The model that is asked for, whose config says which keys there are."""
    return "".join(text for text in overrides if text.startswith("model="))
