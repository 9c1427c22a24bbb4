"""How many of the installed transformers' `ep_plan`s are imported: `python -m tests.hugging_face.expert_survey [NAME ...]`.

A plan is imported if the text that `import-plan` makes of it is parsed and compiled for the model on two ranks of `ep`. It is
equal if transformers' own `apply_expert_parallelism` gives each of two ranks the same elements of every parameter.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from torch import nn

import parallelizer as pz
from parallelizer.child.children import in_children
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh
from parallelizer.propose.from_transformers.imported import parsed
from parallelizer.propose.from_transformers.proposal import propose
from parallelizer.propose.from_transformers.tp_plan import read_ep_plan, with_wildcards
from parallelizer.propose.from_transformers.write_plan import write_plan
from tests.hugging_face.families import Family, families
from tests.hugging_face.placements import TP, Piece, ours, theirs_of_experts

DENSE = ("DiffusionGemmaTextConfig", "Gemma4TextConfig")
"""Their `ep_plan` splits the dense MLP beside the experts over the same ranks too, which then need the same tokens. Here tp
splits it, so `ep` is taken out of the ranks of tp, and what the `ep_plan` names is compared; its attention lies whole, and tp
splits that too.
"""

WITH_EXPERTS = {
    "Gemma4TextConfig": {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16,
    },
}  # fmt: skip
"""What a configuration needs so that its model has experts, where the usual values make none."""


def imported(model: nn.Module, rank: int = TP - 1) -> dict[str, Piece]:
    """The pieces of a rank of two that have tokens of their own."""
    program = pz.compile(parsed(write_plan(propose(model), [])), model, Mesh({"dp_shard": TP}, ep=TP))
    return ours(program, model, rank, "ep")


def imported_over_tp(model: nn.Module, rank: int = TP - 1) -> dict[str, Piece]:
    """The pieces, of what the `ep_plan` names, of a rank of two that tp splits tensors over."""
    program = pz.compile(parsed(write_plan(propose(model), [])), model, Mesh({"tp": TP}, ep=TP))
    over_tp, over_ep = (ours(program, model, rank, axis) for axis in ("tp", "ep"))
    named = {with_wildcards(name) for name in model.ep_plan}  # type: ignore[union-attr]
    wanted = [
        name for name in over_ep if named & {with_wildcards(name), with_wildcards(name).rpartition(".")[0]}
    ]
    return {name: over_ep[name] or over_tp[name] for name in wanted}


def with_experts(family: Family) -> nn.Module:
    """The model of a family, with its experts."""
    return family.build(**WITH_EXPERTS.get(family.config.__name__, {}))


def outcome(some: Sequence[Family], rank: int) -> list[tuple[str, str]]:
    """The configuration of each family, with what is not equal. Uses this process up."""
    warnings.filterwarnings("ignore")
    found = []
    for family in some:
        model = with_experts(family)
        if not read_ep_plan(model):
            found.append((family.config.__name__, "the model has no experts"))
            continue
        try:
            dense = family.config.__name__ in DENSE
            mine = imported_over_tp(model, rank) if dense else imported(model, rank)
        except PlanError as error:
            found.append((family.config.__name__, error.diagnostics[0].code))
            continue
        other = theirs_of_experts(model, rank)
        wrong = [name for name in mine if mine[name] != other[name]]
        found.append((family.config.__name__, ", ".join(sorted({name.split(".")[-3] for name in wrong}))))
    return found


def survey(some: Sequence[Family], ranks: Sequence[int] = range(TP)) -> dict[str, str]:
    """What is not equal, or why it is not imported, by configuration; an empty text where all is equal on these ranks."""
    found: dict[str, str] = {}
    for at in range(0, len(some), 8):
        for rows in in_children([(outcome, some[at : at + 8], rank) for rank in ranks]):
            for name, why in rows:
                found[name] = found.get(name) or why
    return found


def main() -> None:
    """Print how many are imported and equal, and the others with the reason."""
    names = sys.argv[1:]
    found = survey([f for f in families("base_model_ep_plan") if not names or f.name in names])
    equal = [name for name, why in found.items() if not why]
    refused = [name for name, why in found.items() if why and "-" in why]  # a code
    print(
        f"{len(found) - len(refused)} of {len(found)} ep_plans are imported, {len(equal)} put every parameter where "
        f"transformers puts it, on both ranks of ep=2"
    )
    for name, why in found.items():
        if why:
            print(f"- {name}: {why}")


if __name__ == "__main__":
    main()
