"""One training step of the compiled program on a fake world, recorded."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer import torch_private
from parallelizer.child.children import Children, WorldError, in_children
from parallelizer.child.shared_calls import SharedCalls
from parallelizer.compiler.observe.equal_layers import SHORT, Run, runs_of, shorten_runs
from parallelizer.compiler.observe.flex_attention import FlexAttention
from parallelizer.compiler.observe.running_module import Running
from parallelizer.compiler.observe.treated_alike import treated_alike
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.workload import Workload
from parallelizer.mesh import build_mesh
from parallelizer.runtime.apply import apply
from parallelizer.runtime.initialize import allocate
from parallelizer.runtime.pipeline.forms import Forms
from parallelizer.runtime.pipeline.microbatches import microbatches
from parallelizer.runtime.pipeline.progress import listening
from parallelizer.runtime.redistribution import Move, watched
from parallelizer.runtime.step import Loss, train_step
from parallelizer.simulate.fake_world import enter_fake_world
from parallelizer.simulate.record.action_lines import PipelineLines, RankLines, rank_lines
from parallelizer.simulate.record.additive_loss import TriedLoss, refuse_other_than_sums
from parallelizer.simulate.record.cuda_operators import CudaOperators
from parallelizer.simulate.record.ledger import Collective, Ledger
from parallelizer.simulate.record.memory import (
    MemoryChange,
    MemoryTracker,
    Usage,
    counted_random_states,
    highest,
    outline,
    settled,
    usage,
)
from parallelizer.simulate.record.operators import Moment, Operator
from parallelizer.simulate.record.pipeline_step import (
    Marks,
    alike,
    every_part,
    few_actions,
    few_parts,
    pieces_of,
    prepare,
    sample,
    whole_step,
)
from parallelizer.simulate.record.rank_classes import RankClass
from parallelizer.simulate.record.stage_forms import CutTraffic, cut_traffic, stage_forms
from parallelizer.simulate.record.stretch import Look, NotPeriodic, extended, in_module, stretch_phases
from parallelizer.simulate.record.stretch_line import grown_entry, stretch_line
from parallelizer.simulate.record.time_line import TimeLine
from parallelizer.simulate.trace_failed import broken_off, explained
from parallelizer.styles.application import Program
from parallelizer.styles.context_parallel import efficient
from parallelizer.styles.context_parallel.buffers import shard_tokens

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Recipe:
    """What a step needs beside the program: what is fed, the loss, the optimizer, the bound of the gradient norm, and the
    device whose kernels it is for, cpu or cuda.
    """

    workload: Workload
    loss: Loss
    optimizer: OptimizerFactory
    clip: float | None
    device: str = "cpu"


@dataclass(frozen=True)
class Recording:
    """One rank's step as recorded: collectives in order, bytes in use before it by category, and the changes
    in order, the tensors that moved in several hops, and the time line of operators and collectives. `stage_ranks` are, of a
    pipeline, the ranks on `pp` whose stages are alike, with the peak and the bytes sent of each; in the place of a time line it
    has `lines`, of its actions, and `cuts` is what crosses the cuts. `uncounted` are the operators whose own memory is not known.
    """

    ledger: tuple[Collective, ...]
    before: Mapping[str, int]
    changes: tuple[MemoryChange, ...]
    moves: tuple[Move, ...] = ()
    stage_ranks: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    line: tuple[Moment, ...] = ()
    lines: RankLines | None = None
    cuts: tuple[CutTraffic, ...] = ()
    uncounted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Trace:
    """The collectives of one step in order, and the memory over it, of one rank. `folded` is the
    longest run of layers of which short models had a few, `classes` are all classes of ranks, with the peaks of those that
    were traced too, `moves` the tensors that moved in several hops, `stage_ranks` as in `Recording`. `line` has operators and
    collectives in the order in which the host issues them, for pricing; of a pipeline, `lines` has those of the rank's actions,
    and `pipeline` those of all stages, where a rank of every class was traced. `cuts` is what crosses the cuts between stages.
    `uncounted` are the operators that allocate memory inside themselves that `memory` lacks.
    """

    rank: int
    ledger: tuple[Collective, ...]
    memory: Usage
    folded: Run | None = None
    classes: tuple[RankClass, ...] = ()
    moves: tuple[Move, ...] = ()
    stage_ranks: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    line: tuple[Moment, ...] = ()
    lines: RankLines | None = None
    pipeline: PipelineLines | None = None
    cuts: tuple[CutTraffic, ...] = ()
    uncounted: frozenset[str] = frozenset()

    def operators(self) -> Iterator[tuple[Operator, int]]:
        """The operators of the rank's step, each with how often it comes."""
        moments = self.lines.counted() if self.lines is not None else ((moment, 1) for moment in self.line)
        return ((moment, times) for moment, times in moments if isinstance(moment, Operator))


@dataclass(frozen=True)
class StagesTrace:
    """What a step of a rank of a pipeline says of the ranks whose stages are alike: see `Trace`."""

    rank: int
    stage_ranks: Mapping[int, tuple[int, int]]
    lines: RankLines | None


def trace(program: Program, model: nn.Module, recipe: Recipe, rank: int = 0, *, fold: bool = True) -> Trace:
    """One training step as `rank` of the program's world, in children of this process. `model` is on meta and
    left as it is.

    Equal layers are traced in short models, unless `fold` is false or the model does not treat them
    alike. Raises PlanError with a diagnostic that names the module and the operator when the step cannot run
    on fake tensors, and with what is known when the child ends otherwise.
    """
    with tracing(program, model, recipe, rank, fold=fold) as traced:
        return traced()


@contextmanager
def tracing(
    program: Program,
    model: nn.Module,
    recipe: Recipe,
    rank: int = 0,
    *,
    fold: bool = True,
    shared: SharedCalls | None = None,
) -> Iterator[Callable[[], Trace]]:
    """As `trace`, while the body of the `with` runs. The function that is yielded waits for the trace."""
    with tracing_ranks(program, model, recipe, [rank], fold=fold, shared=shared) as traces:
        yield lambda: traces()[0]


@contextmanager
def tracing_ranks(
    program: Program,
    model: nn.Module,
    recipe: Recipe,
    ranks: Sequence[int],
    *,
    fold: bool = True,
    shared: SharedCalls | None = None,
) -> Iterator[Callable[[], list[Trace]]]:
    """As `trace` for several ranks, side by side, while the body of the `with` runs. The function that is yielded waits for the
    traces. With `shared` calls, traces of one model compare its layers once.

    Where equal layers turn out not to be periodic, the whole model is traced, and only as the first of the ranks: that
    may take long.
    """
    runs = runs_of(program, model) if fold and program.stages is None else ()

    def whole(ranks: Sequence[int]) -> list[tuple[Any, ...]]:
        return [(record, program, model, recipe, rank) for rank in ranks]

    def short(runs: Sequence[Run]) -> list[tuple[Any, ...]]:
        return [
            (record_short, program, model, recipe, rank, runs, keeps)
            for rank in ranks
            for keeps in _keeps(len(runs))
        ]

    def compared(calls: SharedCalls, run: Run) -> Callable[[], bool]:
        key = treated_alike, run, recipe.workload.seq_len, recipe.workload.entries
        return calls.start(key, treated_alike, model, recipe.workload, run)

    with (
        SharedCalls() if shared is None else nullcontext(shared) as calls,
        Children(short(runs) if runs else whole(ranks)) as children,
    ):
        alike = [compared(calls, run) for run in runs]

        def finish() -> list[Trace]:
            try:
                if not runs:
                    return _traces(ranks, children.results())
                folded = _folded(children.results, alike, runs, ranks)
                if folded is None and len(runs) > 1:  # those of the longest run may be alike
                    folded = _folded(lambda: in_children(short(runs[:1])), alike[:1], runs[:1], ranks)
                return folded or _traces(ranks[:1], in_children(whole(ranks[:1])))
            except WorldError as error:
                raise broken_off(error) from error

        yield finish


def _keeps(runs: int) -> list[tuple[int, ...]]:
    """The layers that short models keep of each run: the same of all, and one more of each in turn."""
    return [tuple(SHORT + (more == run) for run in range(runs)) for more in (None, *range(runs))]


def _traces(ranks: Sequence[int], recordings: Sequence[Recording]) -> list[Trace]:
    return [
        Trace(
            rank,
            one.ledger,
            usage(one.before, one.changes),
            moves=one.moves,
            stage_ranks=one.stage_ranks,
            line=one.line,
            lines=one.lines,
            cuts=one.cuts,
            uncounted=one.uncounted,
        )
        for rank, one in zip(ranks, recordings, strict=True)
    ]


def _folded(
    results: Callable[[], list[Recording]],
    alike: Sequence[Callable[[], bool]],
    runs: Sequence[Run],
    ranks: Sequence[int],
) -> list[Trace] | None:
    """The traces by short models; None where they cannot stand for the whole one."""
    try:
        recordings = results()
        if not all(one() for one in alike):
            return None
        each = len(runs) + 1
        return [
            _stretched(recordings[each * at], recordings[each * at + 1 : each * (at + 1)], runs, rank)
            for at, rank in enumerate(ranks)
        ]
    except (NotPeriodic, PlanError):  # a forward may want its layers to be as many as they were
        return None


def record_short(
    program: Program,
    model: nn.Module,
    recipe: Recipe,
    rank: int,
    runs: Sequence[Run],
    keeps: Sequence[int],
) -> Recording:
    """As `record`, of a model with so many layers of each run; uses the model up."""
    return record(shorten_runs(program, model, runs, keeps), model, recipe, rank)


def record_stages(program: Program, model: nn.Module, recipe: Recipe, rank: int) -> StagesTrace:
    """As `record`, of a program with stages; without the ledger and the memory, which are large to send."""
    recording = record(program, model, recipe, rank)
    return StagesTrace(rank, recording.stage_ranks, recording.lines)


def record(program: Program, model: nn.Module, recipe: Recipe, rank: int, *, warm: bool = True) -> Recording:
    """Run two steps in a fake world, which this process enters for good, and record the second, when
    optimizer states exist. Between them the loss is tried on a small batch and its parts.

    Without `warm` the first step is recorded, in half of the time, with the optimizer's states made before it. The loss is not
    tried, and what small products in 16 bits take on a CPU is not known.
    """
    warnings.filterwarnings("ignore", message=".* calls flex_attention, which")  # a real run says it
    enter_fake_world(program.mesh.world_size, rank)
    mesh = build_mesh(program.mesh, "cpu")
    compiled = [a.module for a in program.of_slot("compile")]
    program = on_device(not_compiled(program), recipe.device)
    fake = torch_private.FakeTensors()
    microbatch, forms = microbatch_and_forms(program, model, mesh, recipe.workload, fake)
    like = alike(program, model, mesh.get_local_rank("pp")) if program.stages is not None else []
    apply(program, model, mesh)
    pipeline = prepare(model, forms, microbatch)
    running = Running(model)
    seen = TriedLoss(recipe.loss)
    loss = seen.watched()
    ledger = Ledger(program, mesh, running)
    memory = MemoryTracker(running, learns_shapes=not warm, device=recipe.device)
    moves: list[Move] = []
    with fake:
        allocate(model, "cpu")
        ledger.label(model)
        memory.adopt(model.parameters(), "parameters")
        memory.adopt(model.buffers(), "buffers")
        optimizer = recipe.optimizer(model)
        parts = local_parts(recipe.workload, program, mesh)
        few = few_parts(parts)
        for part in parts:
            memory.adopt(part.values(), "batch")
    with explained(program, running, lambda: memory.reached), counted_random_states(memory):
        with FlexAttention(), operators_of(recipe.device), fake, memory:
            if pipeline is not None:
                pipeline.sample = sample(pipeline)[:1]
            if warm:
                # One part makes the gradients and the optimizer's states, whatever their number.
                train_step(model, parts[:1], loss, optimizer, recipe.clip)
            else:
                _make_states(model, optimizer)
        if warm:
            refuse_other_than_sums(seen, recipe.workload, program.mesh)
            memory.scratch.measure()
        _label(memory, model, optimizer)
        start = len(memory.events)
        line = ledger.operators = TimeLine(running, compiled)
        memory.dispatched = line.dispatch
        marks = Marks(lambda: (len(ledger.entries), len(memory.events), len(moves), len(line.line)))

        def began(mark: Any) -> None:
            marks.note(mark)
            if pipeline is not None and isinstance(mark[0], int):
                units = [u for one in pipeline.models.values() for u in torch_private.fsdp_modules(one)]
                memory.adopt(torch_private.unsharded_gradients(units), "unsharded")

        # The memory's mode is the innermost: it looks at who holds a tensor.
        with (
            watched(lambda m: moves.append(dataclasses.replace(m, module=running.current))),
            FlexAttention(),
            operators_of(recipe.device),
            fake,
            ledger,
            memory,
            listening(began),
        ):
            if pipeline is not None:
                pipeline.sample = sample(pipeline)
            train_step(model, few, recipe.loss, optimizer, recipe.clip)
        _label(memory, model, optimizer)
    before, changes = settled(memory.events, start)
    lists: list[list[Any]] = [ledger.entries, changes, moves]
    stage_ranks: dict[int, tuple[int, int]] = {}
    moments: tuple[Moment, ...] = ()
    lines: RankLines | None = None
    if pipeline is None:
        places = list(range(len(line.line)))
        *lists, places = every_part([*lists, places], marks.of(0, 1, 2, 3, since=start), len(parts))
        moments = tuple(line.moments(ledger.entries, places))
    else:
        schedule = pipeline.order[pipeline.rank]
        of_kind = few_actions(pipeline.order)
        lines = rank_lines(line, ledger.entries, marks.of(3), schedule, len(parts), of_kind)
        pieces = pieces_of(lists, marks.of(0, 1, 2, since=start))
        lists = whole_step(pieces, pipeline, len(parts))
        for other in like:
            entries, changed, _ = whole_step(pieces, pipeline, len(parts), other)
            stage_ranks[other] = highest(before, changed), sum(e.wire_bytes for e in entries)
    cuts = cut_traffic(program.stages, forms, len(parts)) if program.stages is not None else ()
    return Recording(
        tuple(lists[0]), before, tuple(lists[1]), tuple(lists[2]), stage_ranks, moments, lines, cuts,
        frozenset(memory.scratch.uncounted),
    )  # fmt: skip


def _make_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let FSDP and the optimizer make what they keep from the first step on. The gradients of it are freed again."""
    torch_private.gather_once(torch_private.fsdp_modules(model))
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.empty_like(param)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def microbatch_and_forms(
    program: Program,
    model: nn.Module,
    mesh: DeviceMesh,
    workload: Workload,
    fake: AbstractContextManager[object],
) -> tuple[Mapping[str, torch.Tensor], Forms]:
    """A microbatch, and what stages are told of it; nothing where the model is not cut."""
    if program.stages is None:
        return {}, {}
    with fake:
        part = local_parts(workload, program, mesh)[0]
        first = microbatches(part, program.plan, program.stages.pipeline.microbatches or 1)[0]
    return first, stage_forms(program, model, mesh, first, fake)


@contextmanager
def operators_of(device: str) -> Iterator[None]:
    """Inside, operators store what they store on the device."""
    if device != "cuda":
        yield
        return
    with CudaOperators(), efficient.planned():
        yield


def not_compiled(program: Program) -> Program:
    """The program without `compile`, whose code cannot be made on fake tensors."""
    kept = tuple(a for a in program if a.slot != "compile")
    return dataclasses.replace(program, applications=kept)


def on_device(program: Program, device: str) -> Program:
    """The program with products in float8 by kernels, as they are on a GPU: the fake world is one of CPUs, which emulate them."""
    if device == "cpu":
        return program
    applications = tuple(
        dataclasses.replace(a, options={"emulate": False, **a.options}) if a.slot == "precision" else a
        for a in program
    )
    return dataclasses.replace(program, applications=applications)


def _stretched(short: Recording, longer: Sequence[Recording], runs: Sequence[Run], rank: int) -> Trace:
    look = Look[Any](module=lambda x: x.module, moved=in_module)
    ledger = stretch_phases(
        short.ledger, [one.ledger for one in longer], lambda e: (e.phase, e.turn), look, runs, _grown
    )
    changes = stretch_phases(
        short.changes,
        [one.changes for one in longer],
        lambda c: (c.phase, 0),  # allocations come in every phase
        look,
        runs,
        outline,
    )
    missing = [run.count - SHORT for run in runs]
    before = {k: extended(short.before[k], (one.before[k] for one in longer), missing) for k in short.before}
    moves = stretch_phases(
        short.moves, [one.moves for one in longer], lambda m: (m.phase, m.turn), look, runs
    )
    line = stretch_line(short.line, [one.line for one in longer], runs)
    return Trace(
        rank,
        tuple(ledger),
        usage(before, changes),
        runs[0],
        moves=tuple(moves),
        line=line,
        uncounted=short.uncounted,
    )


def _grown(
    short: Sequence[Collective], longer: Sequence[Sequence[Collective]], missing: Sequence[int]
) -> list[Collective]:
    """Collectives of a phase outside forward and backward, some of which carry something of each layer. NotPeriodic if there are
    more of them with more layers.
    """
    if any(len(one) != len(short) for one in longer):
        raise NotPeriodic
    return [grown_entry(a, more, missing) for a, *more in zip(short, *longer, strict=True)]


def local_parts(workload: Workload, program: Program, mesh: Any) -> list[dict[str, torch.Tensor]]:
    """What one rank is fed in a step: its rows, in the parts that gradients are accumulated over."""
    ranks = program.mesh.size("dp_replicate", "dp_shard")
    rows = max(1, workload.batch_size // workload.accumulate // ranks)
    parts = []
    for index in range(workload.accumulate):
        whole = workload.example(rows, workload.seq_len, "cpu", seed=index)
        parts.append(shard_tokens(whole, program.plan, mesh))
    return parts


def _label(memory: MemoryTracker, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    memory.adopt([p.grad for p in model.parameters() if p.grad is not None], "gradients")
    for state in optimizer.state.values():
        memory.adopt([t for t in state.values() if isinstance(t, torch.Tensor)], "optimizer")
