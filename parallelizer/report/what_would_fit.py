"""What makes a step fit the memory of a device that it does not fit: changes to the configuration, each dry-run."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from parallelizer.child.children import WorldError
from parallelizer.configuration.origins import NOWHERE
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Findings, PlanError
from parallelizer.language.parse_rule import parse_rule_item
from parallelizer.language.plan import BATCH_AXES, Mesh
from parallelizer.language.yaml_nodes import Scalar
from parallelizer.simulate.record.trace import Trace, trace
from parallelizer.simulate.record.trace_classes import worst
from parallelizer.styles.application import Program

OFFLOADED = ("parameters", "optimizer")
"""What lies in the host's memory all the time with `cpu_offload`."""


@dataclass(frozen=True)
class Alternative:
    """A change, as it is written, and the peak of memory with it."""

    change: str
    peak: int


def what_would_fit(
    setup: Setup, program: Program, model: nn.Module, step: Trace, total: int
) -> list[Alternative]:
    """The peaks with activation checkpointing, offload, a smaller part of the batch at once (accumulated parts, or microbatches
    of a pipeline), and twice the shards, for a device
    of `total` bytes that `step` does not fit; what cannot be tried is left out. If none of them fits alone, the first of them
    are tried together.
    """
    rank = top.rank if (top := worst(step)[1]) is not None else step.rank
    layers = program.of_slot("fsdp") or program.of_slot("stage")
    units = Counter(a.rule.key for a in layers if a.module)
    blocks = units.most_common(1)[0][0] if units else None
    checkpointed = _with_checkpoints(setup, blocks) if blocks and not program.of_slot("checkpoint") else None
    found: list[Alternative] = []
    if checkpointed is not None:
        found += _tried(f"the rule `{blocks}: checkpoint`", checkpointed, model, rank)
    if program.of_slot("fsdp") and not any(a.options.get("cpu_offload") for a in program.of_slot("fsdp")):
        held = sum(step.memory.at_peak.get(kind, 0) for kind in OFFLOADED)
        found.append(Alternative("++parallel.styles.fsdp.cpu_offload=true", step.memory.peak - held))
    found += _smaller_batch(setup, model, rank, step.memory.peak, total)
    wider = Mesh({**setup.mesh.every, "dp_shard": 2 * setup.mesh.sizes["dp_shard"]})
    if setup.workload.batch_size % (wider.size(*BATCH_AXES) * setup.workload.accumulate) == 0:
        change = f"parallel.mesh.dp_shard={wider.sizes['dp_shard']}, on {wider.world_size:,} ranks"
        found += _tried(change, dataclasses.replace(setup, mesh=wider), model, rank)
    if checkpointed is not None and not any(one.peak <= total for one in found):
        together = _smaller_batch(checkpointed, model, rank, step.memory.peak, total)
        found += [
            Alternative(f"the rule `{blocks}: checkpoint` and {one.change}", one.peak) for one in together
        ]
    return found


def _with_checkpoints(setup: Setup, glob: str) -> Setup:
    node = Scalar(f"{glob}: checkpoint", False, NOWHERE)
    return dataclasses.replace(setup, plan=setup.plan.with_rules(parse_rule_item(node, Findings())))


def _smaller_batch(setup: Setup, model: nn.Module, rank: int, peak: int, total: int) -> list[Alternative]:
    """The same batch in more parts, or more microbatches: the fewest that fit, as far as memory grows with the rows evenly; else
    single rows.
    """
    work = setup.workload
    if setup.mesh.sizes["pp"] > 1:
        return _more_microbatches(setup, model, rank, peak, total)
    rows = work.batch_size // (setup.mesh.size(*BATCH_AXES) * work.accumulate)
    smallest = _in_parts(setup, model, rank, work.accumulate * rows) if rows > 1 else []
    if not smallest or smallest[0].peak > total:
        return smallest
    each = (peak - smallest[0].peak) / (rows - 1)
    most = 1 + math.floor((total - smallest[0].peak) / each) if each > 0 else rows
    fitting = next((n for n in range(min(most, rows - 1), 1, -1) if rows % n == 0), 1)
    between = _in_parts(setup, model, rank, work.accumulate * (rows // fitting)) if fitting > 1 else []
    return between if between and between[0].peak <= total else smallest


def _more_microbatches(setup: Setup, model: nn.Module, rank: int, peak: int, total: int) -> list[Alternative]:
    """The same rows in more microbatches: the fewest that fit, as far as memory grows with a microbatch's rows evenly; else
    single rows.
    """
    pipeline, work = setup.pipeline, setup.workload
    ranks = setup.mesh.sizes["pp"]
    if pipeline is None or pipeline.order is not None:
        return []
    now = pipeline.settled(ranks).microbatches or 1
    rows = work.batch_size // (setup.mesh.size(*BATCH_AXES) * work.accumulate)
    more = [n for n in range(now + 1, rows + 1) if rows % n == 0]
    more = [n for n in more if dataclasses.replace(pipeline, microbatches=n).misfit(ranks) is None]

    def tried(number: int) -> list[Alternative]:
        changed = dataclasses.replace(setup, pipeline=dataclasses.replace(pipeline, microbatches=number))
        return [*_tried(f"parallel.pipeline.microbatches={number}", changed, model, rank)]

    smallest = tried(more[-1]) if more else []
    if not smallest or smallest[0].peak > total:
        return smallest
    each = (peak - smallest[0].peak) / (rows // now - rows // more[-1])
    for number in more[:-1]:
        if smallest[0].peak + each * (rows // number - rows // more[-1]) <= total:
            between = tried(number)
            return between if between and between[0].peak <= total else smallest
    return smallest


def _in_parts(setup: Setup, model: nn.Module, rank: int, parts: int) -> list[Alternative]:
    work = setup.workload
    # From the second part on every part needs the same: two stand for all.
    traced = min(parts, max(2, work.accumulate))
    workload = dataclasses.replace(work, accumulate=traced, batch_size=work.batch_size * traced // parts)
    changed = dataclasses.replace(setup, workload=workload)
    return [*_tried(f"train.accumulate={parts}", changed, model, rank)]


def _tried(change: str, setup: Setup, model: nn.Module, rank: int) -> Iterator[Alternative]:
    try:
        traced = trace(setup.compile(model), model, setup.recipe(), rank)
    except (PlanError, WorldError):  # a change that the plan or the model does not take
        return
    yield Alternative(change, traced.memory.peak)
