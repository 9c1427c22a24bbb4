"""The families' matrix; `python -m benchmarks.proofs families` runs all of it, `make test-all` every
model and every column, and the default run one cell of each column."""

from __future__ import annotations

import pytest

from benchmarks.proofs.families import COLUMNS, DESIGNED_WITH, Column, families, prove
from parallelizer.diagnostics.package_folder import config_folder
from tests.chosen import values

pytest.importorskip("transformers", reason="the optional extra `hf`")

CELLS = [(model, column) for model in families() for column in COLUMNS]
ONE_A_COLUMN = list(zip(families(), COLUMNS, strict=False))
"""Every column, each with another model."""


@pytest.mark.ranks
@pytest.mark.parametrize("of", values(CELLS, ONE_A_COLUMN), ids=lambda of: f"{of[0]} on {of[1].name}")
def test_a_cell_is_proven(of: tuple[str, Column]) -> None:
    cell = prove(*of)
    assert cell.passed, cell.reason


def test_every_shipped_model_is_in_one_of_the_matrices() -> None:
    shipped = {path.stem for path in (config_folder() / "model").glob("*.yaml")}
    assert {*families(), *DESIGNED_WITH} == shipped - {"hf"}
    assert len(families()) >= 17


def test_the_columns_use_every_axis_and_both_streams() -> None:
    named = " ".join(column.preset for column in COLUMNS)
    assert all(axis in named for axis in ("tp", "cp", "fsdp"))
    assert {column.whole for column in COLUMNS} == {True, False}
