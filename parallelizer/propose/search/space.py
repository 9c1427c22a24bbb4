"""The candidates of a search, and the rules that leave some out before any is priced."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from parallelizer.compiler.observe.equal_layers import SHORT
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.propose.search.candidate import FULL, NO_CHECKPOINT, SELECTIVE, SPLIT, Candidate
from parallelizer.propose.search.within import Within

MOST_ROWS = 16
"""More rows at once make products no faster, and take more memory. `--within rows=` tries others."""


@dataclass(frozen=True)
class SpaceFacts:
    """What the space depends on. `layers` are the equal layers, which a pipeline is cut between, 0 where they are fewer than
    SHORT; `cuts` says whether the plan allows cuts, `context` and `tensor` whether it has context and tensor parallelism,
    `stream` whether it has a stream that tp splits; `experts` is the number of experts that it shares out, 0 for none.
    `checkpoints` are the modes that are tried, and `balance` has the number of layers of each stage, if it is given;
    `method` is the plan's own of context parallelism.
    """

    gpus: int
    batch: int
    sequence: int
    per_node: int
    layers: int
    cuts: bool
    context: bool
    tensor: bool
    stream: bool
    experts: int = 0
    checkpoints: tuple[str, ...] = (NO_CHECKPOINT, SELECTIVE, FULL)
    balance: tuple[int, ...] = ()
    method: str = ""


@dataclass
class CandidateCount:
    """How many candidates there were, and how many each rule left out."""

    total: int = 0
    excluded: Counter[str] = field(default_factory=Counter)

    def leave_out(self, reason: str) -> None:
        """Count one more."""
        self.total += 1
        self.excluded[reason] += 1


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def candidates(facts: SpaceFacts, within: Within, counted: CandidateCount) -> Iterator[Candidate]:
    """All candidates that no rule leaves out, in a fixed order."""
    for mesh in _meshes(facts, within):
        reason = _wrong_mesh(mesh, facts)
        if reason is not None:
            counted.leave_out(reason)
            continue
        for one in _settings(mesh, facts, within):
            reason = _wrong_settings(one, facts, within)
            if reason is not None:
                counted.leave_out(reason)
            else:
                counted.total += 1
                yield one


def _meshes(facts: SpaceFacts, within: Within) -> Iterator[Candidate]:
    for tp in divisors(facts.gpus):
        for pp in divisors(facts.gpus // tp):
            for cp in divisors(facts.gpus // tp // pp):
                data = facts.gpus // tp // pp // cp
                for replicate in divisors(data):
                    shards = data // replicate
                    for ep in divisors(math.gcd(shards * cp * tp, facts.experts)) if facts.experts else (1,):
                        one = Candidate(pp, replicate, shards, cp, tp, ep=ep)
                        if all(within.number(f"mesh.{axis}", size) for axis, size in one.mesh.every.items()):
                            yield one


def _wrong_mesh(mesh: Candidate, facts: SpaceFacts) -> str | None:
    if mesh.tp > facts.per_node:
        return "tp leaves the node"
    if mesh.tp > 1 and not facts.tensor:
        return "the plan has no tensor parallelism"
    if mesh.cp > 1 and not facts.context:
        return "the plan has no context parallelism"
    if mesh.pp > 1 and not facts.cuts:
        return "the plan allows no cut into stages"
    if mesh.pp > 1 and not facts.layers:
        return f"stages: the model has fewer than {SHORT} equal layers to cut between"
    if mesh.pp > max(facts.layers, 1):
        return "more stages than layers"
    if mesh.cp > 1 and facts.sequence % (2 * mesh.cp):
        return "the sequence does not divide by cp"
    if facts.batch % mesh.data_ranks:
        return "the batch does not divide by the data ranks"
    if mesh.dp_replicate > 1 and mesh.dp_shard == 1 and mesh.cp > 1:
        return "dp_replicate with cp needs dp_shard above 1"
    return None


def _settings(mesh: Candidate, facts: SpaceFacts, within: Within) -> Iterator[Candidate]:
    own_rows = facts.batch // mesh.data_ranks
    rows_tried = [
        n
        for n in divisors(own_rows)
        if within.number("rows", n) and (within.sets("rows") or n <= MOST_ROWS or n == 1)
    ]
    shares = _shares(facts, within)
    for rows in rows_tried:
        parts = own_rows // rows
        for schedule, stages in _schedules(mesh, within):
            # A pipeline keeps what it has gathered in any case, and without shards nothing is gathered.
            one_way = mesh.pp > 1 or mesh.shards == 1
            for accumulate in _accumulated(mesh, parts, within):
                for reshard in ("true",) if one_way else within.words("reshard_after_forward"):
                    for checkpoint in within.words("checkpoint"):
                        if checkpoint not in facts.checkpoints:
                            continue
                        for share in shares if checkpoint == FULL else (1.0,):
                            for stream in (
                                within.words("stream") if mesh.tp > 1 and facts.stream else (SPLIT,)
                            ):
                                for method in within.words("cp.method") if mesh.cp > 1 else ("",):
                                    for precision in within.words("precision"):
                                        yield Candidate(
                                            mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, rows,
                                            accumulate, parts // accumulate if mesh.pp > 1 else 1, schedule, stages,
                                            reshard == "true", checkpoint, share, stream, method,
                                            facts.balance if mesh.pp > 1 else (), ep=mesh.ep, precision=precision,
                                        )  # fmt: skip


def _accumulated(mesh: Candidate, parts: int, within: Within) -> list[int]:
    """The accumulated parts that are tried: of a pipeline 1, unless a limit asks for others. Its microbatches do the same without
    a bubble for each part.
    """
    if mesh.pp == 1:
        return [parts]
    if not within.sets("accumulate"):
        return [1]
    return [n for n in divisors(parts) if within.number("accumulate", n)] or [1]


def _shares(facts: SpaceFacts, within: Within) -> tuple[float, ...]:
    """The shares of layers to checkpoint, each of another number of layers."""
    by_layers = {round(share * facts.layers) or -share: share for share in reversed(within.shares())}
    return tuple(by_layers.values())


def _schedules(mesh: Candidate, within: Within) -> list[tuple[str, int]]:
    if mesh.pp == 1:
        return [("", 1)]
    found = []
    for name in within.words("pipeline.schedule"):
        usual = SCHEDULES[name].stages_per_rank
        several = {usual, 2 * usual, 4 * usual} if name.startswith("interleaved") else {usual}
        found += [(name, n) for n in sorted(several) if within.number("pipeline.stages_per_rank", n)]
    return found


def _wrong_settings(one: Candidate, facts: SpaceFacts, within: Within) -> str | None:
    if not within.number("accumulate", one.accumulate):
        return "not the accumulation that is asked for"
    if facts.balance and len(facts.balance) != one.pp * one.stages_per_rank:
        return "not as many stages as the balance that is given has"
    if one.share < 1 and not round(one.share * facts.layers):
        return "the share of the layers that are checkpointed is less than one layer"
    if one.pp == 1:
        return None
    if not within.number("pipeline.microbatches", one.microbatches):
        return "not the microbatches that are asked for"
    if one.microbatches < one.pp:
        return "fewer microbatches than stages"
    if one.pp * one.stages_per_rank > facts.layers:
        return "more stages than layers"
    if SCHEDULES[one.schedule].misfit(one.pp, one.stages_per_rank, one.microbatches) is not None:
        return "the schedule does not take the numbers"
    return None
