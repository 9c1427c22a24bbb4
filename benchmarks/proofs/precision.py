"""Every recipe of float8 on the presets that together use each axis: one proof a cell."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from benchmarks.proofs import matrix
from benchmarks.proofs.cells import Cell, Row
from benchmarks.proofs.matrix import prove_cell
from parallelizer.styles.float8.recipes import TORCHAO_NAMES

MARKER = "precision"
"""The place of a page that the table is written to."""

MODEL = "llama_debug"
LINEARS = "layers.*.{attention.w[qkvo],feed_forward.w[123]}"


@dataclass(frozen=True)
class Column:
    """A preset. `whole`: the activations between layers are not split over tp. `rules` stand beside the one for float8, and
    `recipes` are those that they are for.
    """

    name: str
    preset: str
    whole: bool = False
    rules: tuple[str, ...] = ()
    recipes: tuple[str, ...] = tuple(TORCHAO_NAMES)


CAST = (
    "layers.*.{attention,feed_forward}: {style: prepare-input, input: {x: stream -> replicate}, cast: float8}"
)
GATHERED = "layers.*: {style: fsdp, gather: float8}"
COLUMNS = (
    Column("tp2, whole stream", "tp2", whole=True),
    Column("tp2", "tp2"),
    Column("tp2, stream gathered in float8", "tp2", rules=(CAST,), recipes=("tensorwise",)),
    Column("fsdp2", "fsdp2"),
    Column("fsdp2, gathered in float8", "fsdp2", rules=(GATHERED,), recipes=("tensorwise",)),
    Column("cp2", "cp2"),
    Column("pp2", "pp2"),
    Column("fsdp2_tp2", "fsdp2_tp2"),
    Column("fsdp2_tp2, gathered in float8", "fsdp2_tp2", rules=(GATHERED,), recipes=("tensorwise",)),
)


def prove(recipe: str, column: Column) -> Cell:
    """One proof. A cell of a recipe that a column is not for is passed if its plan is refused."""
    rules = (f"{LINEARS}: {{style: float8, recipe: {recipe}}}", *column.rules)
    plan = "llama_tp" if column.whole else "llama"
    row = Row(MODEL, plan, overrides=(f"rules=[{','.join(map(repr, rules))}]",))
    found = prove_cell(row, column.preset)
    refused = found.reason.startswith("refused")
    passed = found.passed if recipe in column.recipes else refused
    return dataclasses.replace(found, row=Row(MODEL, "", recipe), preset=column.name, ran="", passed=passed)


def run(*, only: str = "", as_json: bool = False, page: str | None = None) -> int:
    """Prove every cell, or those with `only` in their names, print the table, and write it into a page where one
    is named. 0 when every cell is proven.
    """
    from benchmarks.proofs import show

    if page is not None:
        matrix.check_page(page, MARKER)
    every = [(recipe, column) for recipe in TORCHAO_NAMES for column in COLUMNS]
    every = [(recipe, column) for recipe, column in every if only in matrix.name_of(recipe, column.name)]
    cells = list[Cell]()
    for number, (recipe, column) in enumerate(every, start=1):
        cells.append(prove(recipe, column))
        matrix.progress(cells[-1], f"{number}/{len(every)}")
    across = [column.name for column in COLUMNS if any(column == of for _, of in every)]
    return matrix.report(cells, across, show.summary(cells), MARKER, as_json=as_json, page=page)
