"""How many of the installed transformers' plans are imported: `python -m tests.hugging_face.survey > table.md`.

A plan counts as imported if every entry that names something in the family's model, on meta and of the sizes that the
configuration has by default, becomes a rule, and the plan's text is parsed and compiled for that model on tp=2. It
counts as equal if transformers' own `apply_tensor_parallelism` gives each of two ranks the same elements of every
parameter. Entries that name nothing in that model are counted apart: they are not used, and not shown to be right.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from parallelizer.child.children import in_children
from parallelizer.compiler.compile import compile as compile_plan
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh
from parallelizer.propose.from_transformers.imported import parsed
from parallelizer.propose.from_transformers.proposal import propose
from parallelizer.propose.from_transformers.write_plan import write_plan
from tests.hugging_face import placements
from tests.hugging_face.families import Family, families


@dataclass(frozen=True)
class Row:
    """What became of one plan. `reason` says why it is not imported, or what is not equal; `left` are the entries that
    name nothing in the model.
    """

    family: str
    config: str
    model: str
    entries: int
    strings: tuple[str, ...]
    left: tuple[str, ...] = ()
    imported: bool = False
    equal: bool | None = None
    parameters: int = 0
    reason: str = ""


def survey_one(family: Family, rank: int = 0) -> Row:
    """Import one plan and compare it on one rank. Uses this process up."""
    warnings.filterwarnings("ignore")
    name, strings = family.config.__name__, tuple(family.strings)
    try:
        model = family.build()
    except ValueError as error:
        return Row(family.name, name, "", len(family.config.base_model_tp_plan), strings, reason=str(error))
    kind, entries = type(model).__name__, len(model.tp_plan)
    try:
        proposal = propose(model)
        plan = parsed(write_plan(proposal, []))
        program = compile_plan(plan, model, Mesh({"tp": placements.TP}))
    except PlanError as error:
        reason = "; ".join(f"{d.code}: {d.message}" for d in error.diagnostics)
        return Row(family.name, name, kind, entries, strings, reason=reason)
    left = tuple(f"{e.key}: {e.string}" for e in proposal.unmatched)
    mine = placements.ours(program, model, rank)
    try:
        other = placements.theirs(model, rank)
    except Exception as error:  # whatever transformers raises
        reason = f"transformers does not apply it: {type(error).__name__}: {error}"
        return Row(family.name, name, kind, entries, strings, left, True, None, len(mine), reason)
    wrong = [n for n in mine if mine[n] != other[n]]
    return Row(
        family.name, name, kind, entries, strings, left, True, not wrong, len(mine), f"differ: {wrong[:3]}" if wrong else ""
    )  # fmt: skip


def survey_some(some: Sequence[Family], rank: int = 0) -> list[Row]:
    """One row for each plan. Uses this process up."""
    return [survey_one(family, rank) for family in some]


def survey(some: Sequence[Family], at_once: int = 16) -> list[Row]:
    """One row for each plan, compared on every rank; so many plans share two children."""
    rows: list[Row] = []
    for start in range(0, len(some), at_once):
        part = some[start : start + at_once]
        by_rank = in_children([(survey_some, part, rank) for rank in range(placements.TP)])
        rows += [
            next((row for row in ranks if not row.equal), ranks[0]) for ranks in zip(*by_rank, strict=True)
        ]
    return rows


def main() -> None:
    """Print the table in Markdown."""
    import transformers

    parser = argparse.ArgumentParser(
        "python -m tests.hugging_face.survey", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", help="families; all unless said")
    names = parser.parse_args().names
    rows = survey([family for family in families() if not names or family.name in names])
    imported, equal = [r for r in rows if r.imported], [r for r in rows if r.equal]
    print(
        f"transformers {transformers.__version__}: {len(imported)} of {len(rows)} plans are imported, and {len(equal)} put "
        f"every parameter where transformers puts it ({sum(r.parameters for r in equal):,} parameters, both ranks of tp=2).\n"
    )
    print("| family | configuration | model | entries used | imported | equal | strings, or why not |")
    print("|---|---|---|---:|---|---|---|")
    word = {True: "yes", False: "**no**", None: "-"}
    for r in rows:
        last, used = r.reason or ", ".join(r.strings), f"{r.entries - len(r.left)} of {r.entries}"
        print(
            f"| {r.family} | {r.config} | {r.model} | {used} | {word[r.imported]} | {word[r.equal]} | {last} |"
        )
    uses = Counter(s for r in rows for s in r.strings)
    print("\n| string | plans that use it | imported |\n|---|---:|---:|")
    for string, count in uses.most_common():
        print(f"| {string} | {count} | {sum(string in r.strings for r in imported)} |")


if __name__ == "__main__":
    main()
