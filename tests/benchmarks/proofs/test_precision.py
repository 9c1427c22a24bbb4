"""The table of recipes; `python -m benchmarks.proofs precision` runs all of it."""

from __future__ import annotations

import pytest

from benchmarks.proofs.precision import COLUMNS, prove
from benchmarks.proofs.show import in_a_word
from parallelizer.styles.float8.recipes import TORCHAO_NAMES
from tests.chosen import chosen

pytest.importorskip("torchao", reason="float8 needs torchao")

BY_NAME = {column.name: column for column in COLUMNS}
CELLS = [(recipe, column.name) for recipe in TORCHAO_NAMES for column in COLUMNS]


@pytest.mark.ranks
@pytest.mark.parametrize("cell", chosen(CELLS, []), ids=" on ".join)
def test_a_recipe_is_proven_wherever_it_can_be_used(cell: tuple[str, str]) -> None:
    recipe, name = cell
    found = prove(recipe, BY_NAME[name])
    assert found.passed, found.reason
    assert (in_a_word(found) == "refused") == (recipe not in BY_NAME[name].recipes)


def test_a_recipe_that_a_column_is_not_for_has_to_be_refused() -> None:
    found = prove("rowwise", BY_NAME["fsdp2, gathered in float8"])
    assert found.passed and "one gather cannot serve both" in found.reason
    assert in_a_word(found) == "refused"
