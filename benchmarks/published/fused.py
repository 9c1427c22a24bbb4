"""What Megatron's stack does inside of other kernels or beside them, taken out of the lines of a dry run.

The product that makes a weight's gradient adds it to the gradient of the microbatches before. Activations have the sequence as
their first dim, so that collectives over tp read and write them in place. Where a rank has several stages, the parameters of the
next are gathered, and the gradients of the one before reduced, beside the computation. DeepEP's kernels read the rows of experts
where they lie and write them where they belong, and the weights of experts are applied in the activation's kernel.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from parallelizer.simulate.record.action_lines import PipelineLines, RankLines
from parallelizer.simulate.record.operators import Issued, Moment, Operator, Wait

ADDS = {"add_", "add", "chain"}


def fused_parts(parts: Sequence[Sequence[Moment]]) -> list[list[Moment]]:
    """The parts of an accumulated batch, or the microbatches of a pipeline's action, of which the first adds to no gradient."""
    return [
        _in_place(part if at == 0 else _added_in_products(parts[0], part)) for at, part in enumerate(parts)
    ]


def fused_pipeline(lines: PipelineLines) -> PipelineLines:
    """The lines of a pipeline, each action of it."""
    done: dict[int, RankLines] = {}
    for rank in lines.by_stage.values():
        if id(rank) not in done:
            first = min(rank.stages)
            actions = {
                key: tuple(
                    tuple(line if key[2] == first else without(line, lambda issued: issued.unit))
                    for line in fused_parts(those)
                )
                for key, those in rank.actions.items()
            }
            done[id(rank)] = RankLines(actions, rank.tail, rank.times)
    return dataclasses.replace(
        lines, by_stage={stage: done[id(rank)] for stage, rank in lines.by_stage.items()}
    )


def rows_in_place(line: Sequence[Moment]) -> list[Moment]:
    """The line without what experts do with rows around their products and their activation."""
    return [
        m
        for m in line
        if not (isinstance(m, Operator) and m.kind == "memory" and m.module.endswith(".experts"))
    ]


def pipeline_with_rows_in_place(lines: PipelineLines) -> PipelineLines:
    """The lines of a pipeline, each action of it, as `rows_in_place`."""
    done = {
        id(rank): dataclasses.replace(
            rank,
            actions={
                key: tuple(tuple(rows_in_place(line)) for line in those)
                for key, those in rank.actions.items()
            },
        )
        for rank in lines.by_stage.values()
    }
    by_stage = {stage: done[id(rank)] for stage, rank in lines.by_stage.items()}
    return dataclasses.replace(lines, by_stage=by_stage)


def without(line: Sequence[Moment], gone: Callable[[Issued], bool]) -> list[Moment]:
    """The line without some collectives, and without the waits for them."""
    kept: list[bool] = []
    found: list[Moment] = []
    for moment in line:
        if isinstance(moment, Issued):
            kept.append(not gone(moment))
            if not kept[-1]:
                continue
        elif isinstance(moment, Wait) and moment.back <= len(kept):
            if not kept[-moment.back]:
                continue
            moment = dataclasses.replace(moment, back=sum(kept[-moment.back :]))
        found.append(moment)
    return found


def _added_in_products(first: Sequence[Moment], later: Sequence[Moment]) -> list[Moment]:
    """`later` with what its operators moved in the first microbatch, and without those that were not there."""
    there: dict[tuple[str, str, str], deque[Operator]] = defaultdict(deque)
    for moment in first:
        if isinstance(moment, Operator) and moment.kind == "memory":
            there[_place(moment)].append(moment)
    line: list[Moment] = []
    for moment in later:
        if isinstance(moment, Operator) and moment.kind == "memory" and moment.phase == "backward":
            known = there[_place(moment)]
            if known:
                before = known.popleft()
                moment = before if before.moved < moment.moved else moment
            elif moment.name in ADDS:
                continue
        line.append(moment)
    return line


def _in_place(line: Sequence[Moment]) -> list[Moment]:
    return [m for m in line if not (isinstance(m, Operator) and m.name == "cat")]


def _place(operator: Operator) -> tuple[str, str, str]:
    return operator.phase, operator.module, operator.name
