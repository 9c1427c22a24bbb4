"""What people see of the corpus's findings, kept as text in `rendered/`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, in_order, one_line
from parallelizer.diagnostics.render import render
from parallelizer.language.load import load
from tests import marked
from tests.golden import same
from tests.test_plans import PLANS, ROOT, validated

KEPT = Path(__file__).parent / "rendered"

FORM = (
    "bad/globs",
    "bad/slots",
    "bad/torch_words",
    "bad/transformers_words",
    "bad/yaml_traps",
    "bad/yaml/star_without_quotes",
    "bad/yaml/tab",
    "bad/yaml/key_twice",
    "bad/yaml/deep",
)
MODEL = (
    "pytorch_157182_unmatched_key",
    "hf_query_star",
    "brace_alternative",
    "shadowed_by_a_broader_glob",
    "parameter_of_another_name",
    "transformers_48307_kv_heads",
    "sequence_over_cp_and_tp",
    "batch_over_accumulation",
    "torchtitan_1524_tied_placements",
    "module_and_its_parameter",
    "tp_without_a_rule",
    "world_of_another_size",
    "cp_with_whole_angles",
    "batch_norm",
)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def of_form(name: str) -> list[Diagnostic]:
    path = os.path.relpath(PLANS / f"{name}.yaml", ROOT)
    with pytest.raises(PlanError) as caught:
        load("bad", lambda name, span: path)
    return list(in_order(caught.value.diagnostics))


def of_model(name: str) -> list[Diagnostic]:
    path = PLANS / "bad" / "model" / f"{name}.yaml"
    found = validated(marked.overrides(path.read_text()) or [], path)
    return [d for d in in_order(found) if d.severity != "note"]


@pytest.mark.parametrize("name", FORM)
def test_findings_of_form(name: str) -> None:
    text = "\n\n".join(render(d) for d in of_form(name))
    same(text + "\n", KEPT / f"{Path(name).name}.txt")


@pytest.mark.parametrize("name", MODEL)
def test_findings_on_a_model(name: str) -> None:
    text = "\n\n".join(render(d) for d in of_model(name))
    same(text + "\n", KEPT / f"{name}.txt")


def test_a_narrow_terminal() -> None:
    found = [*of_form("bad/torch_words"), *of_model("module_and_its_parameter")]
    text = "\n\n".join(render(d, width=60) for d in found)
    assert all(len(line) <= 90 for line in text.split("\n"))
    same(text + "\n", KEPT / "narrow.txt")


def test_colour() -> None:
    found = [*of_form("bad/yaml/key_twice"), *of_model("shadowed_by_a_broader_glob")]
    same("\n\n".join(render(d, color=True) for d in found) + "\n", KEPT / "colour.txt")


def test_one_line_for_each() -> None:
    found = [*of_form("bad/yaml_traps"), *of_model("transformers_48307_kv_heads")]
    same("\n".join(map(one_line, found)) + "\n", KEPT / "one_line.txt")


def test_every_kept_text_has_its_plan() -> None:
    names = {Path(name).name for name in (*FORM, *MODEL)} | {"narrow", "colour", "one_line"}
    assert {path.stem for path in KEPT.glob("*.txt")} == names
