"""Every mixture of experts of transformers with its experts shared out, alone and with every other axis: one proof a cell."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from benchmarks.proofs import mixtures
from benchmarks.proofs.markdown import replace_between, table
from benchmarks.proofs.matrix import check_page, name_of
from parallelizer.child.children import WorldError
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import EXPERT, Mesh, Plan
from parallelizer.proof.prove import prove_subject
from parallelizer.proof.runs import References, references_of
from parallelizer.proof.tiny import subject_of
from parallelizer.propose.from_transformers.imported import import_plan, parsed
from parallelizer.propose.from_transformers.tp_plan import read_ep_plan
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.styles.target import forward_names

MARKER = "experts"
"""The place of a page that the table is written to."""


@dataclass(frozen=True)
class Column:
    """A mesh. `split`: the block around the experts gives each rank of tp its part of the sequence."""

    name: str
    mesh: Mapping[str, int]
    split: bool = False


COLUMNS = (
    Column("ep2", {"dp_shard": 2, "ep": 2}),
    Column("ep4", {"dp_shard": 4, "ep": 4}),
    Column("fsdp2 x ep2", {"dp_shard": 4, "ep": 2}),
    Column("ep2 x tp2", {"tp": 2, "ep": 2}),
    Column("ep2 x tp2, stream split", {"tp": 2, "ep": 2}, split=True),
    Column("cp2 x ep2", {"cp": 2, "ep": 2}),
)

ROWS, LENGTH = 4, 12
"""The batch of every proof, so that one unsharded run is compared with all meshes."""


@dataclass(frozen=True)
class ExpertCell:
    """The outcome of one proof: `share` is the worst error as a share of its bound, None where nothing ran."""

    model: str
    column: str
    share: float | None
    passed: bool = False
    reason: str = ""

    @property
    def name(self) -> str:
        """As on the command line of `--only`."""
        return name_of(self.model, self.column)


@dataclass(frozen=True)
class Architecture:
    """A mixture with what all of its cells share: the plan that its own plans come to, that with a split stream, None if no
    block lies around the experts alone, and the unsharded runs.
    """

    setup: Setup
    plan: Plan
    split: Plan | None
    references: References

    @staticmethod
    def of(kind: str) -> Architecture:
        """Raises PlanError for one that cannot be configured, built or run, ValueError for one whose tiny form has no experts."""
        sizes = [f"train.batch_size={ROWS}", f"train.seq_len={LENGTH}"]
        setup = from_config(*compose_config(["model=hf", mixtures.override(kind), *sizes]), planless=True)
        model = setup.build_model()
        if not read_ep_plan(model):  # all of its layers are dense, and a proof would say nothing
            raise ValueError("its tiny form has no experts")
        imported = import_plan(setup, model)
        lines, split = list(split_rules(model)), None
        if lines:
            more = parsed("\n".join(["version: 1", "rules:", *lines]))
            split = dataclasses.replace(imported.plan, rules=(*imported.plan.rules, *more.rules))
        planned = dataclasses.replace(setup, plan=imported.plan)
        return Architecture(planned, imported.plan, split, references_of(subject_of(planned)))


def split_rules(model: nn.Module) -> Iterator[str]:
    """The lines of a plan that give each rank of tp its part of the sequence, in the blocks around experts: router, experts
    and shared experts are whole, and compute the part. None where the block does not name its input.
    """
    experts = read_ep_plan(model)
    modules = dict(model.named_modules())
    for path in experts:
        block = path.rpartition(".")[0]
        (first, *_) = forward_names(modules[block]) or ("",)
        if not first:
            return
        taken = [first, *({"input_ids"} & {*(forward_names(modules[block]) or ())})]
        parts = ", ".join(f"{name}: replicate -> shard(1)" for name in taken)
        flow = f"input: {{{parts}}}, local_input: true, output: shard(1) -> replicate"
        yield f'  "{block}.**": [{{none: io}}, {{none: params}}]'
        yield f'  "{block}": {{style: prepare-io, {flow}}}'
        inside = (name for name in modules if name.startswith(f"{block}.") and name not in experts)
        own = (name for name in inside if next(modules[name].parameters(recurse=False), None) is not None)
        yield from (f'  "{name}": replicate' for name in own)


def prove(column: Column, kind: str, architecture: Architecture) -> ExpertCell:
    """One proof."""
    cell = ExpertCell(kind, column.name, None)
    plan = architecture.split if column.split else architecture.plan
    if plan is None:
        return dataclasses.replace(
            cell, reason="no block around router and experts: they lie in the layer, beside attention"
        )
    sizes = {axis: size for axis, size in column.mesh.items() if axis != EXPERT}
    mesh = Mesh(sizes, ep=column.mesh[EXPERT])
    setup = dataclasses.replace(architecture.setup, plan=plan, mesh=mesh)
    try:
        proof = prove_subject(subject_of(setup), references=architecture.references)
    except PlanError as error:
        return dataclasses.replace(cell, reason=_first(error))
    except LaunchError as error:
        return dataclasses.replace(cell, reason=str(error).strip().splitlines()[0])
    except WorldError as error:
        return dataclasses.replace(cell, reason=str(error).strip().splitlines()[-1])
    reason = proof.divergence.description if proof.divergence else ""
    worst = max(d.share for d in proof.verdict.differences)
    return dataclasses.replace(cell, share=worst, passed=proof.passed, reason=reason)


def run(
    *,
    only: str = "",
    as_json: bool = False,
    page: str | None = None,
    cells: str | None = None,
    run_missing: bool = True,
) -> int:
    """Prove every cell, or those with `only` in their names, print the table, and write it into a page where one is named.
    `cells` is a file in which outcomes are kept: cells that it has do not run again, and without `run_missing` no other runs.
    0 when all cells of an architecture that can be run alone are proven.
    """
    if page is not None:
        check_page(page, MARKER)
    known, done = _read(cells), list[ExpertCell]()
    kinds = mixtures.architectures(lambda kind: any(only in name_of(kind, column.name) for column in COLUMNS))
    for kind, reason in kinds.items():
        asked = [column for column in COLUMNS if only in name_of(kind, column.name)]
        if reason or not asked:
            done += [ExpertCell(kind, column.name, None, reason=reason) for column in asked]
            continue
        missing = [column for column in asked if name_of(kind, column.name) not in known]
        for cell in _proven(kind, missing) if missing and run_missing else ():
            known[cell.name] = cell
            print(f"{cell.name}: {in_a_word(cell)} {cell.reason}", file=sys.stderr, flush=True)
            if cells is not None:
                with Path(cells).open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(cell)) + "\n")
        untried = [ExpertCell(kind, column.name, None, reason="not run yet") for column in asked]
        done += [known.get(cell.name, cell) for cell in untried]
    text = f"{summary(done)}\n\n{markdown(done)}"
    if page is not None:
        replace_between(page, MARKER, text)
    if as_json:
        json.dump([dataclasses.asdict(cell) for cell in done], sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        print(text)
    return 0 if all(cell.passed or kinds[cell.model] for cell in done) else 1


def _first(error: PlanError) -> str:
    """The first error in a line."""
    first = next(d for d in error.diagnostics if d.severity == "error")
    return f"{first.code}: {first.message}"


def _proven(kind: str, columns: Sequence[Column]) -> Iterator[ExpertCell]:
    try:
        architecture = Architecture.of(kind)
    except PlanError as error:
        reason = _first(error)
    except WorldError as error:
        reason = str(error).strip().splitlines()[-1]
    except ValueError as error:
        reason = str(error)
    else:
        yield from (prove(column, kind, architecture) for column in columns)
        return
    yield from (ExpertCell(kind, column.name, None, reason=reason) for column in columns)


def _read(path: str | None) -> dict[str, ExpertCell]:
    """The cells in a file, by name; none where there is no file yet."""
    if path is None or not Path(path).exists():
        return {}
    found = [ExpertCell(**json.loads(line)) for line in Path(path).read_text().splitlines()]
    return {cell.name: cell for cell in found}


def in_a_word(cell: ExpertCell) -> str:
    """What became of a cell."""
    if cell.passed:
        return "proven"
    return "not equal" if cell.share is not None else "not run"


def summary(cells: Sequence[ExpertCell]) -> str:
    """How many architectures are proven on all meshes, how many cells are, and the worst error."""
    by_model = {
        model: [c for c in cells if c.model == model] for model in dict.fromkeys(c.model for c in cells)
    }
    whole = sum(all(c.passed for c in own) for own in by_model.values())
    shares = [c.share for c in cells if c.passed and c.share is not None]
    worst = f"; the worst error is {max(shares):.2f} of its bound" if shares else ""
    return f"{whole} of {len(by_model)} architectures are proven on every mesh, {len(shares)} of {len(cells)} cells{worst}."


def markdown(cells: Sequence[ExpertCell]) -> str:
    """The table: a row an architecture, a column a mesh, in each cell the worst error as a share of its bound. Architectures
    without a proof, and the reasons, are below.
    """
    across = [column.name for column in COLUMNS if any(cell.column == column.name for cell in cells)]
    by_name = {(cell.model, cell.column): cell for cell in cells}
    ran = dict.fromkeys(cell.model for cell in cells if cell.passed or cell.share is not None)
    lines = [
        [model, *(_shown(by_name[model, column]) if (model, column) in by_name else "" for column in across)]
        for model in ran
    ]
    together: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if not cell.passed:
            together.setdefault((cell.model, cell.reason), []).append(cell.column)
    others = [
        f"- {model}{'' if len(where) == len(across) else ' on ' + ', '.join(where)}: {why}"
        for (model, why), where in together.items()
    ]
    return "\n\n".join([table(["architecture", *across], lines), "\n".join(others)]).strip()


def _shown(cell: ExpertCell) -> str:
    return f"{cell.share:.2f}" if cell.passed and cell.share is not None else in_a_word(cell)
