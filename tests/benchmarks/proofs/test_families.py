"""A cell of the families' matrix, another every day; `python -m benchmarks.proofs families` runs all of it."""

from __future__ import annotations

import datetime
import random

import pytest

from benchmarks.proofs.families import COLUMNS, DESIGNED_WITH, Column, families, prove
from parallelizer.diagnostics.package_folder import config_folder

pytest.importorskip("transformers", reason="the optional extra `hf`")

CELLS = [(model, column) for model in families() for column in COLUMNS]
TODAY = random.Random(datetime.date.today().isoformat()).sample(CELLS, 2)


@pytest.mark.ranks
@pytest.mark.parametrize(("model", "column"), TODAY, ids=lambda part: getattr(part, "name", part))
def test_todays_cells_are_proven(model: str, column: Column) -> None:
    cell = prove(model, column)
    assert cell.passed, cell.reason


def test_every_shipped_model_is_in_one_of_the_matrices() -> None:
    shipped = {path.stem for path in (config_folder() / "model").glob("*.yaml")}
    assert {*families(), *DESIGNED_WITH} == shipped - {"hf"}
    assert len(families()) >= 17


def test_the_columns_use_every_axis_and_both_streams() -> None:
    named = " ".join(column.preset for column in COLUMNS)
    assert all(axis in named for axis in ("tp", "cp", "fsdp"))
    assert {column.whole for column in COLUMNS} == {True, False}
