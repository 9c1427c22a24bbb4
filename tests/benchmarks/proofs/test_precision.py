"""The table of recipes; `python -m benchmarks.proofs precision` runs all of it, `make test-all` every pair of its values."""

from __future__ import annotations

import pytest

from benchmarks.proofs.precision import TABLES, prove
from benchmarks.proofs.show import in_a_word
from parallelizer.styles.float8.recipes import TORCHAO_NAMES
from tests.chosen import pairs

pytest.importorskip("torchao", reason="float8 needs torchao")

COLUMNS = {column.name: column for columns, _ in TABLES for column in columns}
MODELS = {model.name: model for _, models in TABLES for model in models}
CELLS = [
    (model.name, recipe, column.name)
    for columns, models in TABLES
    for model in models
    for recipe in TORCHAO_NAMES
    for column in columns
]


DEFAULT = [("llama_debug", "rowwise", "tp2"), ("llama_debug", "tensorwise", "fsdp2, gathered in float8")]


@pytest.mark.ranks
@pytest.mark.parametrize("cell", pairs(CELLS, DEFAULT), ids=" on ".join)
def test_a_recipe_is_proven_wherever_it_can_be_used(cell: tuple[str, str, str]) -> None:
    model, recipe, name = cell
    if model.startswith("hf_"):
        pytest.importorskip("transformers", reason="the optional extra `hf`")
    found = prove(MODELS[model], recipe, COLUMNS[name])
    assert found.passed, found.reason
    assert (in_a_word(found) == "refused") == (recipe not in COLUMNS[name].recipes)


def test_a_recipe_that_a_column_is_not_for_has_to_be_refused() -> None:
    found = prove(MODELS["llama_debug"], "rowwise", COLUMNS["fsdp2, gathered in float8"])
    assert found.passed and "one gather cannot serve both" in found.reason
    assert in_a_word(found) == "refused"
