"""Every shipped Llama under both plans on every preset that fits: one proof a cell."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from benchmarks.proofs.cells import Cell, Row
from benchmarks.proofs.markdown import around, replace_between
from parallelizer.child.children import WorldError
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.diagnostics.render import width_of_terminal
from parallelizer.language.plan import BATCH_AXES, Mesh
from parallelizer.proof.prove import prove
from parallelizer.proof.tiny import shrink, small_mesh
from parallelizer.runtime.launch.failures import LaunchError

MARKER, FULL_MARKER = "matrix", "full-matrix"
"""The places of a page that the tables are written to."""

RANKS, FULL_RANKS = 8, 16
"""The most ranks of a cell: with axes shrunk to 2, and with the preset's own sizes."""


PLANS = ("llama", "llama_tp")
OPTIONS = (
    Row("llama_debug", "llama", "two accumulated parts", accumulate=2),
    Row("llama_debug", "llama", "checkpointed layers", ('rules=["layers.*: checkpoint"]',)),
    Row("llama_debug", "llama", "tied embeddings", ("++model.tie_embeddings=true",)),
    Row(
        "llama_debug",
        "llama",
        "20 tokens, small parameters whole",
        ("++parallel.styles.fsdp.min_size=100",),
        seq_len=20,
    ),
    Row(
        "llama_debug", "llama", "fsdp on the largest dimension", ("++parallel.styles.fsdp.shard_dim=largest",)
    ),
)
"""Rows that vary what a model is trained with."""


def models() -> list[str]:
    """The Llamas under the plans of the matrix, which the tool was designed with; `families` has the others."""
    found = (p.stem for p in (config_folder() / "model").glob("llama*.yaml"))
    return sorted(name for name in found if not name.endswith("_packed"))


def presets() -> list[str]:
    """The shipped presets without a pipeline. Those with one have a table of their own."""
    return [name for name, mesh in meshes().items() if mesh.sizes["pp"] == 1]


@cache
def meshes() -> dict[str, Mesh]:
    """The shipped presets with their meshes, read from their files alone: to compose all of them takes seconds."""
    folder = config_folder() / "parallel"
    names = sorted(p.stem for p in folder.glob("*.yaml") if p.stem != "base")
    return {p: Mesh({**OmegaConf.load(folder / f"{p}.yaml").get("mesh", {})}) for p in names}  # type: ignore[union-attr]


def rows() -> list[Row]:
    """Every shipped model under both plans, and the rows that vary the options."""
    return [Row(model, plan) for model in models() for plan in PLANS] + list(OPTIONS)


def columns(full_mesh: bool = False) -> list[str]:
    """The presets that fit into the ranks of a cell. With the real sizes, those that have an axis above 2: the
    others are what they are in the small matrix.
    """
    if full_mesh:
        return [
            p
            for p in presets()
            if small_mesh(meshes()[p]).sizes != meshes()[p].sizes and meshes()[p].world_size <= FULL_RANKS
        ]
    return [p for p in presets() if small_mesh(meshes()[p]).world_size <= RANKS]


@dataclass
class Known:
    """What cells of a matrix share: the outcome of each computation, and the last real model that was built."""

    cells: dict[str, Cell] = field(default_factory=dict)
    model: tuple[str, nn.Module] | None = None

    def model_of(self, setup: Setup) -> nn.Module:
        """The real model of a configuration. Compiling for it leaves it as it is."""
        key = repr(setup.model)
        if self.model is None or self.model[0] != key:
            self.model = key, setup.build_model()
        return self.model[1]


def prove_cell(row: Row, preset: str, full_mesh: bool = False, known: Known | None = None) -> Cell:
    """One proof.

    Models and presets that shrink to the same small ones are one computation: `known` keeps what was found,
    and each cell's real sizes are compiled all the same.
    """
    chosen, known = _setup(row, preset), known or Known()
    ran = str(chosen.mesh if full_mesh else small_mesh(chosen.mesh))
    options: dict[str, Any] = {"full_mesh": full_mesh, "accumulate": row.accumulate, "seq_len": row.seq_len}
    key = computation_of(shrink(chosen, **options)[0])
    try:
        model = known.model_of(chosen)
        if key in known.cells:
            chosen.compile(model)
            return dataclasses.replace(known.cells[key], row=row, preset=preset, ran=ran)
        proof = prove(chosen, model=model, **options)
    except PlanError as error:
        return Cell(row, preset, False, None, ran, f"refused: {error.diagnostics[0].message}")
    except (LaunchError, WorldError) as error:
        return Cell(row, preset, False, None, ran, str(error).strip().splitlines()[0])
    reason = proof.divergence.description if proof.divergence else ""
    known.cells[key] = Cell(
        row, preset, proof.passed, max(d.share for d in proof.verdict.differences), ran, reason
    )
    return known.cells[key]


def computation_of(small: Setup) -> str:
    """All that a proof's figures depend on."""
    plan, work = small.plan, small.workload
    parts = (
        {key: value for key, value in small.model.items() if key != "tiny"},
        small.mesh.sizes,
        plan.rules,
        plan.layouts,
        small.defaults,
        work.batch_size,
        work.seq_len,
        work.accumulate,
    )
    return repr(parts)


def _setup(row: Row, preset: str) -> Setup:
    """The configuration of a cell, with a batch that every data rank has two rows of in each part."""
    plan = [f"plan={row.plan}"] if row.plan else []
    chosen = from_config(*compose_config([f"model={row.model}", *plan, f"parallel={preset}", *row.overrides]))
    rows = 2 * chosen.mesh.size(*BATCH_AXES) * row.accumulate
    return dataclasses.replace(
        chosen, workload=dataclasses.replace(chosen.workload, batch_size=rows, accumulate=row.accumulate)
    )


def run(*, full_mesh: bool = False, only: str = "", as_json: bool = False, page: str | None = None) -> int:
    """Prove every cell, or those with `only` in their names, print the table, and write it into a page where one
    is named. 0 when every cell is proven.
    """
    from benchmarks.proofs import show

    marker = FULL_MARKER if full_mesh else MARKER
    if page is not None:
        check_page(page, marker)
    across, cells, known = columns(full_mesh), list[Cell](), Known()
    every = [(row, preset) for row in rows() for preset in across if only in name_of(row.name, preset)]
    across = [preset for preset in across if any(preset == of for _, of in every)]
    for number, (row, preset) in enumerate(every, start=1):
        cells.append(prove_cell(row, preset, full_mesh, known))
        progress(cells[-1], f"{number}/{len(every)}")
    counted = f"{len(known.cells)} proofs: {show.summary(cells)}"
    return report([(cells, across)], counted, marker, as_json=as_json, page=page)


def report(
    tables: Sequence[tuple[list[Cell], list[str]]],
    counted: str,
    marker: str,
    *,
    as_json: bool,
    page: str | None,
) -> int:
    """Print tables, each of cells and the names of its columns, and write them into a page where one is named. 0 when every cell
    is proven.
    """
    from benchmarks.proofs import show

    cells = [cell for of_table, _ in tables for cell in of_table]
    text = "\n\n".join([counted, *(show.markdown(*one) for one in tables if one[0])])
    if page is not None:
        replace_between(page, marker, text)
    if as_json:
        json.dump(show.document(cells), sys.stdout, indent=1)
        sys.stdout.write("\n")
    elif sys.stdout.isatty():
        print(f"{show.listing(cells, width_of_terminal())}\n\n{counted}")
    else:
        print(text)
    return 0 if all(c.passed for c in cells) else 1


def check_page(page: str, marker: str) -> None:
    """Raise PlanError for a page without a place for the table. Before the minutes that the proofs take."""
    try:
        around(page, marker)
        reason = "" if os.access(page, os.W_OK) else f"{page} may not be written"
    except (OSError, ValueError) as error:
        reason = f"{page}: {error.strerror}" if isinstance(error, OSError) else str(error)
    if reason:
        advice = f"name a page with the lines `<!-- {marker}:begin -->` and `<!-- {marker}:end -->`"
        raise PlanError([Diagnostic("file-unwritable", reason, None, advice)])


def name_of(row: str, preset: str) -> str:
    """What a cell is called."""
    return f"{row} on {preset}"


def progress(cell: Cell, count: str) -> None:
    """Tell of a cell that is done, on stderr."""
    from benchmarks.proofs.show import in_a_word

    print(f"[{count}] {name_of(cell.row.name, cell.preset)}: {in_a_word(cell)}", file=sys.stderr, flush=True)
