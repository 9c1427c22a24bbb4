"""The pictures of docs/styles.md show what the dry run reports of the plans above them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallelizer.language.plan import Mesh
from parallelizer.language.styles import STYLES
from parallelizer.styles.application import tensor_placements
from tests.docs.pictured import compiled, traced
from tests.docs.test_site import DOCS, script

draw = script(DOCS / "pictures/draw.py")
PICTURES = draw.pictures()
TEXT = (DOCS / "styles.md").read_text()
SECTIONS = dict(re.findall(r"^## ([\w-]+)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))
WITHOUT = {"experts", "float8", "local-random", "stage"}
"""Styles under which no tensor of a step moves, now or later; of float8 a few largest values do. Of `experts` it depends on the
tokens what moves."""


def plan_of(style: str, folder: Path) -> Path:
    """The plan above the picture, in a file."""
    [text, *_] = re.findall(r"```yaml\n(.*?)```", SECTIONS[style], re.S)
    path = folder / f"{style}.yaml"
    path.write_text(text)
    return path


def test_every_style_has_a_section_and_a_picture() -> None:
    assert set(SECTIONS) == set(STYLES) == set(PICTURES) | WITHOUT
    for style in PICTURES:
        assert f"](pictures/{style}.svg)" in SECTIONS[style]


@pytest.mark.parametrize("style", STYLES)
def test_the_options_are_the_declared_ones(style: str) -> None:
    rows = []
    for name, option in STYLES[style].options.items():
        default = STYLES[style].defaults.get(name)
        choices = f": {', '.join(f'`{c}`' for c in option.choices)}" if option.choices else ""
        rows.append(f"| `{name}` | {f'`{default}`' if default else ''} | {option.doc}{choices} |")
    assert re.findall(r"^\| `.*$", SECTIONS[style], re.M) == rows


@pytest.mark.parametrize("style", PICTURES)
def test_the_picture_is_drawn_from_the_data(style: str) -> None:
    assert (DOCS / f"pictures/{style}.svg").read_text() == draw.drawn(style, PICTURES[style])


@pytest.mark.parametrize("style", PICTURES)
def test_what_moves_is_what_the_dry_run_reports(style: str, tmp_path: Path) -> None:
    picture = PICTURES[style]
    [axis] = picture["mesh"]
    ledger = traced(plan_of(style, tmp_path), Mesh(picture["mesh"])).ledger
    for phase in ("forward", "backward"):
        shown = [(step["move"], axis, step["bytes"]) for step in picture[phase] if "move" in step]
        found = [
            (entry.kind, entry.axis, entry.payload_bytes)
            for entry in ledger
            if entry.module == picture["module"] and (entry.phase == "forward") == (phase == "forward")
        ]
        if (
            shown != found
        ):  # gradients of replicated parameters are summed behind backward, those of several modules together
            [(kind, axis, size)] = shown
            together = next(e for e in ledger if (e.phase, e.kind, e.axis) == ("clip", kind, axis))
            assert not found and together.module == "" and size < together.payload_bytes < 2 * size


@pytest.mark.parametrize("style", PICTURES)
def test_weights_lie_as_the_plan_places_them(style: str, tmp_path: Path) -> None:
    picture = PICTURES[style]
    program, model = compiled(plan_of(style, tmp_path), Mesh(picture["mesh"]))
    assert any(a.style == style for a in program.applications), "the plan uses the style"
    for step in picture["forward"]:
        if step.get("weight") == "weight":
            name = f"{picture['module']}.weight"
            assert list(model.get_parameter(name).shape) == step["shape"]
            assert str(tensor_placements(program.applications)[name]["tp"]) == step["held"]
