"""Which tokens share a scale of float8: those that one rank has in one microbatch.

One process has all tokens. This file groups them as they lie on ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import BATCH_AXES, TENSOR_AXES, Plan
from parallelizer.runtime.pipeline.microbatches import has_rows
from parallelizer.styles.application import Program
from parallelizer.styles.context_parallel.dealing import order_for
from parallelizer.styles.context_parallel.order import Dealt, Order, order_of, static_order, tagged
from parallelizer.styles.experts.find import names_of

UNPROVEN = (
    "prove the plan with the recipe rowwise-gw-hp, under which no tokens share a scale, or on a mesh of tp alone; scales are "
    "those of the tokens of a rank"
)


@dataclass(frozen=True)
class ExpertTokens:
    """The tokens of stacked experts: the arguments of forward with the tokens, their experts and the weights of these, and how
    many ranks of data and cp bring theirs together; 0 if ranks that share experts out have parts of one rank's tokens.
    """

    names: tuple[str, str, str]
    joined: int = 1


@dataclass(frozen=True)
class LowPrecision:
    """The modules that compute in float8 with their recipes, and the groups of tokens that share a scale. `experts` are those of
    the modules that hold stacked experts.

    The rows are those of `data` ranks, each of which cuts its own into `microbatches` while it trains; of each row the
    tokens are those of `ranks` ranks, as `balance` deals out a sequence of `length`.
    """

    recipes: Mapping[str, str]
    data: int
    microbatches: int
    ranks: int
    balance: str
    length: int
    experts: Mapping[str, ExpertTokens] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """The equal blocks of rows: an evaluation is in one piece."""
        return self.data * (self.microbatches if torch.is_grad_enabled() else 1)


def low_precision(program: Program, length: int, pipeline: Pipeline | None) -> LowPrecision | None:
    """What a program computes in float8; None for nothing. `length` is that of a whole sequence."""
    recipes = {a.module: a.options.get("recipe", "tensorwise") for a in program.of_slot("precision")}
    if not recipes:
        return None
    microbatches = (pipeline.microbatches or 1) if pipeline is not None and program.stages is not None else 1
    mesh = program.mesh
    return LowPrecision(
        recipes,
        mesh.size(*BATCH_AXES),
        microbatches,
        mesh.sizes["cp"],
        program.plan.balance,
        length,
        _tokens_of_experts(program),
    )


def _tokens_of_experts(program: Program) -> dict[str, ExpertTokens]:
    """Of ep ranks that share experts out neighbours are those of tp first, which have the same tokens or parts of them."""
    ep, tp = program.mesh.ep, program.mesh.size(*TENSOR_AXES)
    shared = {a.module: names_of(a.options) for a in program.of_slot("experts")} if ep > 1 else {}
    joined = ep // tp if ep % tp == 0 else 0
    return {
        a.module: ExpertTokens(shared[a.module], joined)
        if a.module in shared
        else ExpertTokens(names_of(a.options))
        for a in program.of_slot("precision")
        if a.stacked
    }


def dealt_out(
    batch: Mapping[str, torch.Tensor], plan: Plan, rows: int, precision: LowPrecision, tp: int
) -> dict[str, torch.Tensor]:
    """The batch of one process, of `rows` rows: the same values, in tensors that know how ranks would deal them out."""
    split = {n: b for n, b in plan.batch.items() if b.dim is not None and b.make is None and n in batch}
    if precision.ranks == 1 or not split:
        return dict(batch)
    share, found = rows // precision.data, []
    for rank in range(precision.data):
        own = {
            k: v[rank * share : (rank + 1) * share] if has_rows(k, v, plan, rows) else v
            for k, v in batch.items()
        }
        order, length = order_for(own, split, plan, precision.ranks, tp)
        positions = torch.stack([order.positions(length, of) for of in range(precision.ranks)], -2)
        found.append(positions.expand(share, -1, -1))
    dealt = Dealt(precision.ranks, order.length, torch.cat(found))
    return {k: tagged(v.view_as(v), dealt) if k in split else v for k, v in batch.items()}


class ScaleGroups:
    """The groups of tokens that share a scale, in the batch that is in a model now."""

    def __init__(self, precision: LowPrecision) -> None:
        self.precision = precision
        self.order: Order | None = None

    def follow(self, model: nn.Module) -> None:
        """From now on take the order from the model's inputs, as ranks do."""
        model.register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        self.order = next((order for t in tensors if (order := order_of(t)) is not None), None)

    def groups(self, shape: torch.Size, *, joined: int = 1) -> torch.Tensor:
        """The row-major numbers of the tokens in a tensor of these leading dims: int64 [groups, tokens]. So many neighbouring
        ranks bring their tokens together. Raises PlanError if they cannot be told apart.
        """
        try:
            return joined_groups(token_groups(shape, self.precision, self.order), self.precision, joined)
        except ValueError as error:
            raise unproven(str(error)) from None


def unproven(why: str) -> PlanError:
    """The error for tokens that cannot be told apart."""
    message = f"float8 cannot be proven here, since the tokens of ranks cannot be told apart: {why}"
    return PlanError([Diagnostic("model-failed", message, None, UNPROVEN)])


def joined_groups(groups: torch.Tensor, precision: LowPrecision, joined: int) -> torch.Tensor:
    """Groups [data * microbatches * ranks, tokens] with those of so many neighbouring ranks of data and cp as one; a microbatch
    is joined with those of the same number. Raises ValueError for 0, see `ExpertTokens`.
    """
    if joined == 1:
        return groups
    if not joined:
        raise ValueError("ranks that share experts out have parts of the tokens of one rank")
    parts = precision.blocks // precision.data
    by_rank = groups.view(precision.data, parts, precision.ranks, -1).transpose(0, 1)
    return by_rank.reshape(parts * precision.data * precision.ranks // joined, -1)


def token_groups(shape: torch.Size, precision: LowPrecision, order: Order | None = None) -> torch.Tensor:
    """The numbers of the tokens of each group: int64 [groups, tokens]. Without an order, rows are dealt out as `balance` says
    of any batch. Raises ValueError if the tokens cannot be told apart.
    """
    number = torch.arange(shape.numel())
    if shape.numel() % precision.blocks:
        raise ValueError(f"{list(shape)} tokens do not divide into {precision.blocks} blocks")
    blocks = number.view(precision.blocks, -1)
    if precision.ranks == 1:
        return blocks
    if blocks.size(1) % precision.length:
        raise ValueError(f"{list(shape)} tokens are no sequences of {precision.length}")
    rows = number.view(-1, precision.length)
    order = order or static_order(precision.balance, precision.ranks)
    if order.length is not None:
        raise ValueError(f"a sequence of {precision.length} does not divide over {precision.ranks} ranks")
    dealt = [order.positions(precision.length, rank) for rank in range(precision.ranks)]
    if order.varies and dealt[0].ndim == 2 and len(dealt[0]) != len(rows):
        raise ValueError(f"{list(shape)} tokens are no {len(dealt[0])} sequences of {precision.length}")
    parts = [rows.gather(1, positions.expand(len(rows), -1)) for positions in dealt]
    return torch.stack([part.view(precision.blocks, -1) for part in parts], 1).flatten(0, 1)
