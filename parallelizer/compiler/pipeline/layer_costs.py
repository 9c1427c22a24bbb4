"""What the layers of a model cost, in parameters, memory or time, for stages of equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelizer.compiler.compilation import Compilation
from parallelizer.compiler.pipeline.survey import Survey
from parallelizer.compiler.pipeline.unit_calls import UnitCall
from parallelizer.language.pipeline.actions import stages_of
from parallelizer.language.pipeline.settings import Pipeline, order_of, stage_rank
from parallelizer.language.plan import BATCH_AXES, TENSOR_AXES

STATES = 16.0
"""The bytes of a parameter in a step: its float32 value, its gradient and two moments of Adam."""

SPLIT = ("colwise", "rowwise", "shard-params")
"""Styles that divide a module's parameters over tp."""


@dataclass(frozen=True)
class LayerCosts:
    """The cost of each layer, of what runs before the first, and of what runs after the last. A layer is a candidate with
    everything up to the next one.
    """

    each: tuple[float, ...]
    head: float
    tail: float


def layer_costs(
    state: Compilation, pipeline: Pipeline, balance: str, found: Survey, stages: int
) -> list[LayerCosts]:
    """The costs on each stage, by a word of `BALANCES`. They differ from stage to stage for `memory`: a stage holds as many
    microbatches as its schedule has live there.
    """
    if balance != "memory":
        return [_summed(found, [_cost(state, balance, one) for one in found.calls], balance)] * stages
    held = _summed(found, [STATES * _local_parameters(state, one) for one in found.calls], balance)
    kept = _summed(found, [_kept_bytes(state, pipeline, one) for one in found.calls], balance)
    return [
        LayerCosts(
            tuple(a + live * b for a, b in zip(held.each, kept.each, strict=True)),
            held.head + live * kept.head,
            held.tail + live * kept.tail,
        )
        for live in _live(pipeline, state.mesh.sizes["pp"])
    ]


def _summed(found: Survey, costs: Sequence[float], balance: str) -> LayerCosts:
    each = [0.0] * len(found.candidates)
    head = tail = 0.0
    behind = False
    for one, cost in zip(found.calls, costs, strict=True):
        if one.place == 0:
            head += cost
        elif behind:
            tail += cost
        else:
            each[one.place - 1] += cost
            behind = one.place == len(each) and one.unit == found.candidates[-1]
    if balance == "layers":
        return LayerCosts((1.0,) * len(each), float(head > 0), float(tail > 0))
    return LayerCosts(tuple(each), head, tail)


def _cost(state: Compilation, balance: str, one: UnitCall) -> float:
    """The cost of one call. For time, only forwards count: a backward takes twice as long, so the ratios are the same."""
    return float(one.flops) if balance == "time" else float(_parameters(state, one))


def _parameters(state: Compilation, one: UnitCall) -> int:
    return 0 if one.index else sum(p.numel() for p in state.modules[one.unit].parameters())


def _local_parameters(state: Compilation, one: UnitCall) -> float:
    """The parameters of a unit that a rank holds: divided over tp where a rule of the module that owns them says so, and over
    the data ranks where any rule is of fsdp.
    """
    if one.index:
        return 0.0
    count = 0.0
    for path, module in state.modules[one.unit].named_modules(prefix=one.unit):
        own = sum(p.numel() for p in module.parameters(recurse=False))
        count += own / (state.mesh.size(*TENSOR_AXES) if _is_split(state, path) else 1)
    sharded = any(("fsdp", None) in slots for slots in state.winners.values())
    return count / (state.mesh.size(*state.mesh.fsdp_axes) if sharded else 1)


def _is_split(state: Compilation, path: str) -> bool:
    return any(slot == "params" and style in SPLIT for slot, style in _rules(state, path))


def _kept_bytes(state: Compilation, pipeline: Pipeline, one: UnitCall) -> float:
    """The bytes that a rank keeps of one microbatch for a unit's backward: what its operators return, divided as the batch, the
    sequence and the unit's own rules divide it. A checkpointed unit keeps its input alone, which does not count.
    """
    inside = [path for path, _ in state.modules[one.unit].named_modules(prefix=one.unit)]
    if any(slot == "checkpoint" for slot, _ in _rules(state, one.unit)):
        return 0.0
    work = state.workload
    rows = 2 if work is None else work.batch_size / work.accumulate / state.mesh.size(*BATCH_AXES)
    split = any(_is_split(state, path) for path in inside)
    ranks = state.mesh.sizes["cp"] * (state.mesh.size(*TENSOR_AXES) if split else 1)
    return one.bytes / 2 * rows / (pipeline.microbatches or 1) / ranks  # the survey has two rows


def _rules(state: Compilation, path: str) -> list[tuple[str, str]]:
    """The slot and the style of each rule of a module."""
    return [(slot, use.style) for (slot, _), (_, use) in state.winners.get(path, {}).items()]


def _live(pipeline: Pipeline, ranks: int) -> list[int]:
    """The most microbatches that each stage holds at once."""
    order, placed = order_of(pipeline, ranks), stage_rank(pipeline, ranks)
    most = [0] * len(placed)
    for rank, actions in enumerate(order):
        live = dict.fromkeys(stages_of(placed, rank), 0)
        for action in actions:
            live[action.stage] += {"F": 1, "I": 0}.get(action.kind, -1)
            most[action.stage] = max(most[action.stage], live[action.stage])
    return most
