"""The matrix; `python -m benchmarks.proofs` runs all of it, `make test-all` every row and every preset, and the default run one
cell of each kind of row and of each mesh."""

from __future__ import annotations

from itertools import cycle, islice

import pytest

from benchmarks.proofs.cells import Cell, Row
from benchmarks.proofs.markdown import replace_between, table
from benchmarks.proofs.matrix import (
    Known,
    _setup,
    columns,
    computation_of,
    meshes,
    models,
    presets,
    prove_cell,
    rows,
)
from benchmarks.proofs.show import document, listing, markdown, summary
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.proof.tiny import shrink, small_mesh
from tests.chosen import values

COLUMNS = columns()
CELLS = [(row, preset) for row in rows() for preset in COLUMNS]
KNOWN = Known()


def one_of_each_kind() -> list[tuple[Row, str]]:
    """Cells in which every plan, every option and every mesh that runs is, each in as few as there can be."""
    of_row = list({(row.plan, row.note): row for row in reversed(rows())}.values())[::-1]
    of_mesh = list({ran(preset): preset for preset in reversed(COLUMNS)}.values())[::-1]
    number = max(len(of_row), len(of_mesh))
    return list(islice(zip(cycle(of_row), cycle(of_mesh), strict=False), number))


def ran(preset: str) -> str:
    """The mesh that a preset becomes in a proof."""
    return str(small_mesh(meshes()[preset]))


@pytest.mark.ranks
@pytest.mark.parametrize("of", values(CELLS, one_of_each_kind()), ids=lambda of: f"{of[0].name} on {of[1]}")
def test_a_cell_is_proven(of: tuple[Row, str]) -> None:
    cell = prove_cell(*of, known=KNOWN)
    assert cell.passed, cell.reason


def test_the_default_run_holds_every_kind() -> None:
    cells = one_of_each_kind()
    assert {(row.plan, row.note) for row, _ in cells} == {(row.plan, row.note) for row in rows()}
    assert {ran(preset) for _, preset in cells} == {ran(preset) for preset in COLUMNS}
    assert len(cells) <= 11


def test_every_shipped_model_and_preset_is_in_the_matrix() -> None:
    assert {row.model for row, _ in CELLS} == set(models())
    assert {preset for _, preset in CELLS} == set(presets())
    assert len(models()) >= 4 and len(presets()) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets())
def test_the_mesh_of_a_preset_s_file_is_that_of_the_composed_configuration(preset: str) -> None:
    assert meshes()[preset] == from_config(*compose_config([f"parallel={preset}"])).mesh


def test_the_matrix_of_real_meshes_has_those_that_the_small_one_shrinks() -> None:
    assert set(columns(full_mesh=True)) == {"cp4", "fsdp4", "fsdp4_ep4", "tp4", "tp8_cp2"}


def test_models_and_presets_that_shrink_to_the_same_share_a_proof() -> None:
    def computation(model: str, preset: str, plan: str = "llama") -> str:
        return computation_of(shrink(_setup(Row(model, plan), preset))[0])

    assert computation("llama3_8b", "tp2") == computation("llama3_405b", "tp4")
    others = {computation("llama_debug", "tp2"), computation("llama3_8b", "cp2")}
    assert len(others | {computation("llama3_8b", "tp2"), computation("llama3_8b", "tp2", "llama_tp")}) == 4


def test_a_table_counts_and_explains_what_is_not_green() -> None:
    row = Row("model", "plan")
    cells = [
        Cell(row, "a", True, 0.25, "tp=2"),
        Cell(row, "b", False, 3.0, "cp=2", "the loss is off"),
        Cell(row, "c", False, None, "tp=2", "rank 1"),
    ]
    assert summary(cells) == "1 of 3 cells are proven; the worst error is 0.25 of its bound."
    meant = [*cells, *(Cell(row, p, True, None, "", "refused: one gather cannot serve both") for p in "de")]
    assert summary(meant) == (
        "1 of 5 cells are proven, 2 are refused, as they have to be; the worst error is 0.25 of its bound."
    )
    assert summary(meant[:-1]).startswith("1 of 4 cells are proven, 1 is refused, as it has to be;")
    text = markdown(cells, ["a", "b", "c"])
    assert "| model, plan | 0.25 | **not equal** | **failed** |" in text
    assert "on b: the loss is off" in text
    short = listing(cells, 40)
    assert "model, plan\n  a 0.25, b not equal, c failed\n" in short and "on b: the loss is off" in short
    assert max(map(len, short.split("\n"))) <= 40
    assert not document(cells)["passed"]


def test_a_page_keeps_what_is_around_the_table(tmp_path) -> None:  # type: ignore[no-untyped-def]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- t:begin -->\nold\n<!-- t:end -->\nafter\n")
    replace_between(page, "t", table(["a"], [["x|y"]]))
    assert page.read_text() == "before\n<!-- t:begin -->\n| a |\n| --- |\n| x\\|y |\n<!-- t:end -->\nafter\n"
    with pytest.raises(ValueError, match="no place"):
        replace_between(page, "other", "")
