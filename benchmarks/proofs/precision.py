"""Every recipe of float8 on the presets that together use each axis, for models of several kinds, and with the styles and
schedules that run a forward otherwise: one proof a cell.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.proofs import matrix
from benchmarks.proofs.cells import Cell, Row
from benchmarks.proofs.families import layouts_of
from benchmarks.proofs.matrix import prove_cell
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.styles.float8.recipes import TORCHAO_NAMES

MARKER = "precision"
"""The place of a page that the table is written to."""


@dataclass(frozen=True)
class Model:
    """A model with the glob of the linears that are in float8, and that of the modules whose input is gathered for them.
    `input` is the name of that input.
    """

    name: str
    linears: str
    modules: str
    input: str

    @property
    def casting(self) -> str:
        """The rule that gathers inputs in float8."""
        flow = f"{{{self.input}: stream -> replicate}}"
        return f"{self.modules}: {{style: prepare-input, input: {flow}, cast: float8}}"


NEOX = "gpt_neox.layers.*"
MODELS = (
    Model(
        "llama_debug",
        "layers.*.{attention.w[qkvo],feed_forward.w[123]}",
        "layers.*.{attention,feed_forward}",
        "x",
    ),
    Model(
        "hf_qwen3",
        "model.layers.*.{self_attn.{q,k,v,o}_proj,mlp.{gate,up,down}_proj}",
        "model.layers.*.self_attn",
        "hidden_states",
    ),
    Model(
        "hf_gpt_neox",
        f"{NEOX}.{{attention.{{query_key_value,dense}},mlp.dense_{{h_to_4h,4h_to_h}}}}",
        f"{NEOX}.{{attention,mlp}}",
        "hidden_states",
    ),
    Model(
        "hf_opt",
        "model.decoder.layers.*.{self_attn.{q,k,v,out}_proj,fc[12]}",
        "model.decoder.layers.*.self_attn",
        "hidden_states",
    ),
)
"""A Llama; a family of transformers like it; two with biases, of which one has a fused projection."""


@dataclass(frozen=True)
class Column:
    """A preset. `whole`: the activations between layers are not split over tp. `recipes` are those that the column is for.

    `rules` stand beside the one for float8, with {layers} for the glob of layers and {casting} for the rule that gathers
    inputs. `overrides` are others of the command line, and `accumulate` the parts of a batch.
    """

    name: str
    preset: str
    whole: bool = False
    rules: tuple[str, ...] = ()
    recipes: tuple[str, ...] = tuple(TORCHAO_NAMES)
    overrides: tuple[str, ...] = ()
    accumulate: int = 1


GATHERED = "{layers}: {{style: fsdp, gather: float8}}"
COLUMNS = (
    Column("tp2, whole stream", "tp2", whole=True),
    Column("tp2", "tp2"),
    Column("tp2, stream gathered in float8", "tp2", rules=("{casting}",), recipes=("tensorwise",)),
    Column("fsdp2", "fsdp2"),
    Column("fsdp2, gathered in float8", "fsdp2", rules=(GATHERED,), recipes=("tensorwise",)),
    Column("cp2", "cp2"),
    Column("pp2", "pp2"),
    Column("fsdp2_tp2", "fsdp2_tp2"),
    Column("fsdp2_tp2, gathered in float8", "fsdp2_tp2", rules=(GATHERED,), recipes=("tensorwise",)),
    Column("fsdp2_cp2_tp2", "fsdp2_cp2_tp2"),
)
"""What every model is proven on."""

OPTIONS = (
    Column("checkpointed layers", "fsdp2_tp2", rules=("{layers}: checkpoint",)),
    Column("compiled layers", "fsdp2_tp2", rules=("{layers}: {{style: compile, backend: aot_eager}}",)),
    Column("two accumulated parts", "fsdp2_tp2", accumulate=2),
    *(
        Column(f"pp2, {name}", "pp2", overrides=(f"++parallel.pipeline.schedule={name}", "model.n_layers=4"))
        for name in SCHEDULES
        if name != Pipeline().schedule
    ),
)
"""What the first model is proven with beside that. The preset pp2 has the schedule that is left out."""

MIXTURES = tuple(
    Model(
        name,
        "model.layers.*.{self_attn.[qkvo]_proj,mlp.experts}",
        "model.layers.*.self_attn",
        "hidden_states",
    )
    for name in ("hf_qwen3_moe", "hf_mixtral")
)
"""Stacked experts, and the linears of attention beside them."""

OF_ROWS = ("rowwise", "rowwise-gw-hp")
EXPERT_COLUMNS = (
    Column("experts on fsdp2", "fsdp2", recipes=OF_ROWS),
    Column("experts on tp2", "tp2", recipes=OF_ROWS),
    Column("experts on fsdp2_ep2", "fsdp2_ep2", recipes=OF_ROWS),
    Column("experts on tp2, ep2", "tp2", recipes=OF_ROWS, overrides=("parallel.mesh.ep=2",)),
    Column("experts on fsdp2_ep4_tp2", "fsdp2_ep4_tp2", recipes=OF_ROWS),
)
"""What mixtures are proven on, by the recipes that experts can have."""

TABLES = ((COLUMNS, MODELS), (OPTIONS, MODELS[:1]), (EXPERT_COLUMNS, MIXTURES))
"""The tables, each by its columns and its models."""


def prove(model: Model, recipe: str, column: Column) -> Cell:
    """One proof. A cell of a recipe that a column is not for is passed if its plan is refused."""
    linears = f"{model.linears}: {{style: float8, recipe: {recipe}}}"
    layers = model.linears.partition(".*")[0] + ".*"
    more = [rule.format(layers=layers, casting=model.casting) for rule in column.rules]
    overrides = [f"rules=[{','.join(map(repr, (linears, *more)))}]", *column.overrides]
    if column.whole:
        overrides += [f"++parallel.layouts.{name}=replicate" for name in layouts_of(model.name)]
    found = prove_cell(Row(model.name, "", "", tuple(overrides), column.accumulate), column.preset)
    refused = found.reason.startswith("refused")
    passed = found.passed if recipe in column.recipes else refused
    row = Row(model.name, "", recipe)
    return dataclasses.replace(found, row=row, preset=column.name, ran="", passed=passed)


def run(
    *,
    only: str = "",
    as_json: bool = False,
    page: str | None = None,
    cells: str | None = None,
    run_missing: bool = True,
) -> int:
    """Prove every cell, or those with `only` in their names, print the tables, and write them into a page where one
    is named. `cells` is a file in which outcomes are kept: cells that it has do not run again, and without `run_missing` no
    other runs. 0 when every cell is proven.
    """
    from benchmarks.proofs import show

    if page is not None:
        matrix.check_page(page, MARKER)
    every = [(m, r, c) for columns, models in TABLES for m in models for r in TORCHAO_NAMES for c in columns]
    every = [one for one in every if only in _name(*one)]
    known = _read(cells)
    for number, one in enumerate(every, start=1):
        if _name(*one) not in known and run_missing:
            known[_name(*one)] = found = prove(*one)
            matrix.progress(found, f"{number}/{len(every)}")
            if cells is not None:
                with Path(cells).open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(found)) + "\n")
    done = [known[_name(*one)] for one in every if _name(*one) in known]
    tables = []
    for columns, _ in TABLES:
        names = [column.name for column in columns]
        found_of = [cell for cell in done if cell.preset in names]
        tables.append((found_of, [name for name in names if any(cell.preset == name for cell in found_of)]))
    return matrix.report(tables, show.summary(done), MARKER, as_json=as_json, page=page)


def _read(path: str | None) -> dict[str, Cell]:
    """The cells in a file, by name; none where there is no file yet."""
    if path is None or not Path(path).exists():
        return {}
    found = [json.loads(line) for line in Path(path).read_text().splitlines()]
    cells = [Cell(**{**one, "row": Row(**{**one["row"], "overrides": ()})}) for one in found]
    return {matrix.name_of(cell.row.name, cell.preset): cell for cell in cells}


def _name(model: Model, recipe: str, column: Column) -> str:
    return matrix.name_of(f"{model.name}, {recipe}", column.name)
