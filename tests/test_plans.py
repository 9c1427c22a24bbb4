"""The corpus of plans: every mistake of the bad ones is found at its place, and the good ones are fine."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import pytest
from omegaconf import DictConfig

from parallelizer.compiler.checks.idle_rules import idle_rules
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.origins import Origins
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, one_line
from parallelizer.language.load import load
from tests import marked

ROOT = Path(__file__).parents[1]
PLANS = Path(__file__).parent / "plans"
FORM = sorted([*(PLANS / "bad").glob("*.yaml"), *(PLANS / "bad" / "yaml").glob("*.yaml")])
MODEL = sorted((PLANS / "bad" / "model").glob("*.yaml"))
PRESETS = sorted((PLANS / "bad" / "presets").glob("*.yaml"))
GOOD = sorted((PLANS / "good").glob("*.yaml"))
RUN = [path for path in GOOD if marked.overrides(path.read_text()) is not None]


@lru_cache
def composed(overrides: tuple[str, ...]) -> tuple[DictConfig, Origins]:
    """A configuration with the models of the corpus beside the shipped ones."""
    return compose_config(overrides, str(PLANS / "conf"))


def validated(overrides: list[str], plan: Path | None) -> list[Diagnostic]:
    """What `validate` finds before a step is traced."""
    try:
        config, origins = composed(tuple(overrides))
        if plan is not None:
            config = config.copy()
            config.plan = os.path.relpath(plan)
        setup = from_config(config, origins)
        program = setup.compile(setup.build_model())
    except PlanError as error:
        return list(error.diagnostics)
    return [*program.diagnostics, *idle_rules(program)]


@pytest.mark.parametrize("path", FORM, ids=lambda path: path.stem)
def test_every_mistake_of_form_is_found_in_its_columns_and_nothing_else(path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        load("bad", lambda name, span: str(path))
    marked.check(path.read_text(), caught.value.diagnostics)


@pytest.mark.parametrize("path", MODEL, ids=lambda path: path.stem)
def test_every_mistake_on_a_model_is_found_in_its_columns_and_nothing_else(path: Path) -> None:
    text = path.read_text()
    overrides = marked.overrides(text)
    assert overrides is not None, f"the first line of {path} is not `{marked.COMMAND}overrides`"
    marked.check(text, validated(overrides, path), os.path.relpath(path))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_mistake_of_a_preset_is_found_in_its_columns_and_nothing_else(
    path: Path, tmp_path: Path
) -> None:
    text = path.read_text()
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "mine.yaml").write_text(text)
    try:
        setup = from_config(*compose_config(["parallel=mine"], str(tmp_path)))
        found = setup.compile(setup.build_model()).diagnostics
    except PlanError as error:
        found = error.diagnostics
    marked.check(text, found)


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_good_plans_pass_without_an_error_or_a_warning(path: Path) -> None:
    found = validated(marked.overrides(path.read_text()) or [], path)
    assert [one_line(d) for d in found if d.severity != "note"] == []


def test_there_are_as_many_plans_as_the_corpus_promises() -> None:
    assert len(FORM) + len(MODEL) + len(PRESETS) >= 80
    assert len(GOOD) >= 20
    threads = [
        p for p in (*FORM, *MODEL, *PRESETS) if "#" in p.read_text().split("rules:")[0] and has_thread(p)
    ]
    assert len(threads) >= 10


def has_thread(path: Path) -> bool:
    """Whether a bad plan names the public thread that it is from, as in `# torchtitan#932: ...`."""
    return any(
        line.startswith("# ") and line[2:].partition("#")[2][:1].isdigit()
        for line in path.read_text().split("\n")
    )


def test_every_mark_is_of_a_code_and_understood() -> None:
    for path in (*FORM, *MODEL, *PRESETS):
        assert marked.marks(path.read_text()), path


def test_the_marks_themselves_are_understood() -> None:
    text = "a: b\n#  ^ some-code: a message | a help\nruls: 1\n#<<< other-code: text\n#@ x/y.yaml:3:4 far-away: m"
    assert marked.marks(text) == [
        marked.Mark(1, 4, 5, "some-code", "a message", "a help"),
        marked.Mark(3, 1, 4, "other-code", "text", ""),
        marked.Mark(3, 4, 0, "far-away", "m", "", "x/y.yaml"),
    ]
    with pytest.raises(AssertionError, match="expected and not found"):
        marked.check(text, [])
