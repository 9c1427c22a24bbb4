"""The table of recipes; `python -m benchmarks.proofs precision` runs all of it, `make test-all` every value of its columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.proofs.precision import MARKER, TABLES, Column, prove
from benchmarks.proofs.show import in_a_word
from parallelizer.styles.float8.recipes import TORCHAO_NAMES
from tests.chosen import values

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
@pytest.mark.parametrize("cell", values(CELLS, DEFAULT), ids=" on ".join)
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


@pytest.mark.ranks
@pytest.mark.slow
def test_layers_that_inductor_compiles_are_proven() -> None:
    compiled = Column("compiled by inductor", "fsdp2", rules=("{layers}: compile",))
    found = prove(MODELS["llama_debug"], "rowwise", compiled)
    assert found.passed and found.share is not None, found.reason


def test_the_page_has_the_rows_and_columns_of_the_command() -> None:
    text = Path("docs/precision.md").read_text()
    _, _, rest = text.partition(f"<!-- {MARKER}:begin -->\n")
    counted, *tables = rest.partition(f"<!-- {MARKER}:end -->")[0].strip().split("\n\n")
    assert len(tables) == len(TABLES)
    for table, (columns, models) in zip(tables, TABLES, strict=True):
        head, _, *rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
        ]
        assert head == ["model", *(column.name for column in columns)]
        assert [row[0] for row in rows] == [f"{m.name}, {recipe}" for m in models for recipe in TORCHAO_NAMES]
        for row, recipe in zip(rows, [r for _ in models for r in TORCHAO_NAMES], strict=True):
            assert [cell == "refused" for cell in row[1:]] == [recipe not in c.recipes for c in columns], row
    refused = sum(recipe not in column.recipes for _, recipe, column in every_cell())
    assert counted.startswith(
        f"{len(CELLS) - refused} of {len(CELLS)} cells are proven, {refused} are refused, as they have to be;"
    )


def every_cell() -> list[tuple[str, str, Column]]:
    return [(model, recipe, COLUMNS[name]) for model, recipe, name in CELLS]
