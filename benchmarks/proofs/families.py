"""Every family of models that has a shipped plan, on the presets that together use each axis: one proof a cell."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from benchmarks.proofs import matrix
from benchmarks.proofs.cells import Cell, Row
from benchmarks.proofs.matrix import Known, prove_cell
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.package_folder import config_folder

MARKER = "families"
"""The place of a page that the table is written to."""

DESIGNED_WITH = ("llama_debug", "llama3_8b", "llama3_70b", "llama3_405b")
"""The models of the other matrix, which has every preset."""


@dataclass(frozen=True)
class Column:
    """A preset. `whole`: the activations between layers are not split over tp."""

    name: str
    preset: str
    whole: bool = False


COLUMNS = (
    Column("tp2", "tp2"),
    Column("tp2, whole stream", "tp2", whole=True),
    Column("cp2", "cp2"),
    Column("fsdp2", "fsdp2"),
    Column("fsdp2_tp2", "fsdp2_tp2"),
    Column("cp2_tp2", "cp2_tp2"),
    Column("fsdp2_cp2_tp2", "fsdp2_cp2_tp2"),
    Column("fsdp2_cp2_tp2, whole stream", "fsdp2_cp2_tp2", whole=True),
)


def families() -> list[str]:
    """The shipped models that are not Llama as this project writes it, in the order of their names."""
    found = sorted(p.stem for p in (config_folder() / "model").glob("*.yaml"))
    return [name for name in found if name != "hf" and name not in DESIGNED_WITH]


def prove(model: str, column: Column, known: Known | None = None) -> Cell:
    """One proof: a model under its own plan."""
    switched = [f"++parallel.layouts.{name}=replicate" for name in layouts_of(model)] if column.whole else []
    found = prove_cell(Row(model, "", overrides=tuple(switched)), column.preset, known=known)
    return dataclasses.replace(found, row=Row(model, ""), preset=column.name, ran="")


def layouts_of(model: str) -> tuple[str, ...]:
    """The layouts of the plan of a model, each of which a switch to whole streams must set."""
    return tuple(from_config(*compose_config([f"model={model}"])).plan.layouts)


def run(*, only: str = "", as_json: bool = False, page: str | None = None) -> int:
    """Prove every cell, or those with `only` in their names, print the table, and write it into a page where one
    is named. 0 when every cell is proven.
    """
    from benchmarks.proofs import show

    if page is not None:
        matrix.check_page(page, MARKER)
    cells, known = list[Cell](), Known()
    every = [(model, column) for model in families() for column in COLUMNS]
    every = [(model, column) for model, column in every if only in matrix.name_of(model, column.name)]
    for number, (model, column) in enumerate(every, start=1):
        cells.append(prove(model, column, known))
        matrix.progress(cells[-1], f"{number}/{len(every)}")
    across = [column.name for column in COLUMNS if any(column == of for _, of in every)]
    return matrix.report([(cells, across)], show.summary(cells), MARKER, as_json=as_json, page=page)
