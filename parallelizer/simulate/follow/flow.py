"""How tensors really lie, followed through one forward and backward of the compiled program on a fake world.

Data parallelism is left out, whose ranks may differ in everything until gradients are summed: what is
followed is which values vary over the axes that cut the model itself, and under context parallelism, what takes a
part of the sequence for the whole of it.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelizer import torch_private
from parallelizer.compiler.observe.equal_layers import SHORT, Run, longest_run, shorten
from parallelizer.compiler.observe.flex_attention import FlexAttention
from parallelizer.compiler.observe.phase import current as current_phase
from parallelizer.compiler.observe.phase import phase
from parallelizer.compiler.observe.running_module import Running
from parallelizer.compiler.observe.users_code import written_at
from parallelizer.diagnostics.diagnostic import PlanError, Span
from parallelizer.language.plan import BATCH_AXES, EXPERT, TENSOR_AXES, Mesh, Placement
from parallelizer.language.workload import Workload
from parallelizer.mesh import build_mesh
from parallelizer.runtime.apply import apply
from parallelizer.runtime.initialize import allocate
from parallelizer.runtime.loss_sums import loss_sums
from parallelizer.runtime.step import Loss, outcome_for_loss
from parallelizer.simulate.collectives import axes_by_ranks, expert_meshes
from parallelizer.simulate.fake_world import enter_fake_world, raises_anywhere, remedy
from parallelizer.simulate.follow import beside
from parallelizer.simulate.follow.attention_shapes import OtherShape, watch_attention, whole_attention
from parallelizer.simulate.follow.counted_positions import LocalPositions
from parallelizer.simulate.follow.parts import Part
from parallelizer.simulate.follow.sequence import watch_sequence
from parallelizer.simulate.follow.varying import (
    SEQUENCE_AXIS,
    ApartDraw,
    EqualDraw,
    EqualSum,
    Operand,
    Tags,
    Varying,
)
from parallelizer.simulate.follow.whole import TakenApart, WholeNeeded, lays_of, watch_wholes
from parallelizer.simulate.whole_numbers import WholeNumbers, whole_numbers_of
from parallelizer.styles.application import Application, Program
from parallelizer.styles.context_parallel.buffers import shard_tokens
from parallelizer.styles.layouts import without_cast
from parallelizer.styles.sharded_logits import is_sharded, taken_sharded

FOLLOWED = ("params", "io", "random", "attention", "experts")


@dataclass(frozen=True)
class Arrival:
    """An input of `ndim` dimensions as it arrives at a module, before its rule lays it out anew, and the placement that the
    rule takes it for on `axis`.

    `since` is the module in which its value began to vary over the axis, None if it does not vary. `dim` is the dimension
    that it is cut along, where that is known, and `packed` the projection that packed its features, where nothing has taken
    their parts from each other yet; `takes_packed` says that the rule of the module is for such features.
    """

    module: str
    name: str
    axis: str
    expected: Placement
    since: str | None
    ndim: int
    dim: int | None = None
    packed: str = ""
    takes_packed: bool = False


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter after backward: the axes over which it `varies`, those over which it is `partial` (a term
    of a sum, as DTensor has it) and those over which it is `sharded`. `arrived` are the axes over which the inputs of the
    parameter's module vary.
    """

    parameter: str
    varies: Tags
    partial: frozenset[str]
    sharded: frozenset[str]
    arrived: Tags


@dataclass(frozen=True)
class StepFailure:
    """The step raised. `module` was running, `operator` was called last, with `operands`; `span` is the line of the
    model, `remedy` what to do if it is the model's fault, `numbers` what the module's forward read that may be sizes of
    the whole model. `anywhere` says that real tensors would raise it too.
    """

    module: str
    phase: str
    operator: str
    error: str
    text: str
    operands: tuple[Operand, ...] = ()
    span: Span | None = None
    remedy: str = ""
    numbers: WholeNumbers | None = None
    anywhere: bool = False

    @property
    def computes(self) -> bool:
        """Whether the last operator computes anything; torch's own checks end with a question about the tensor."""
        return self.operator not in ("", "prim.device.default")


@dataclass
class FollowedStep:
    """What was seen of a step, in order of execution; checks decide what of it is wrong.

    `arrivals` are inputs on the axes of their rules, `sums` are sums of what every rank holds alike, `loss` are the axes over
    which the loss varies, `attentions` the modules whose attention sees a part of the sequence, `shapes` those that it has in
    another shape than that of a rank's heads and rows. `folded` is the run of layers of which only SHORT were followed.
    """

    arrivals: list[Arrival] = field(default_factory=list)
    sums: list[EqualSum] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    loss: Tags = field(default_factory=dict)
    positions: list[LocalPositions] = field(default_factory=list)
    attentions: list[str] = field(default_factory=list)
    taken_apart: list[TakenApart] = field(default_factory=list)
    wholes: list[WholeNeeded] = field(default_factory=list)
    shapes: list[OtherShape] = field(default_factory=list)
    other_sizes: list[beside.OtherSize] = field(default_factory=list)
    failure: StepFailure | None = None
    draws: list[EqualDraw] = field(default_factory=list)
    apart: list[ApartDraw] = field(default_factory=list)
    folded: Run | None = None
    sharded_output: bool = False
    """Whether the loss was given DTensors."""

    def paths(self, path: str) -> Iterator[str]:
        """The paths in the whole model that a path in the followed one stands for."""
        return iter((path,)) if self.folded is None else self.folded.stands_for(path)


def follow(
    program: Program, model: nn.Module, workload: Workload, loss: Loss, *, fold: bool = True
) -> FollowedStep:
    """Run one forward and backward in a fake world, which this process enters for good; the model is used
    up. With `fold`, few of many equal layers run.
    """
    warnings.filterwarnings("ignore")  # of torch, about what a real run will say again
    run = longest_run(program, model) if fold else None
    if run is not None:
        program = shorten(program, model, run, SHORT)
    rows = _rows(program, workload)
    program = _without_data_axes(program)
    flow = FollowedStep(folded=run)
    step = _Step(program, model, flow)
    try:
        step.run(workload, rows, loss)
    except PlanError:  # a loss of another form: that is no plan's fault
        raise
    except (Exception, SystemExit) as error:  # whatever torch, or the model, raises
        flow.failure = step.failure(error)
    return flow


def followed_facts(program: Program, workload: Workload) -> object:
    """What of a program and a workload the outcome of `follow` depends on, for one model of which one run of layers is equal and
    one loss: equal facts, equal outcomes.
    """
    followed, rows = _without_data_axes(program), _rows(program, workload)
    applied = [
        (a.module, a.slot, a.style, a.axes, a.axis, a.options, a.params, a.buffers, a.packed, a.divided, a.arrives, a.stacked)
        for a in followed
    ]  # fmt: skip
    sizes = followed.mesh.sizes, followed.mesh.ep, rows, workload.seq_len
    return (
        sizes,
        workload.entries,
        program.plan.layouts,
        program.redistribute,
        applied,
    )


def _rows(program: Program, workload: Workload) -> int:
    """The sequences that a rank computes at once."""
    rows = workload.batch_size // workload.accumulate // program.mesh.size(*BATCH_AXES)
    if program.stages is not None:
        rows //= program.stages.pipeline.microbatches or 1
    return max(1, rows)


class _Step:
    """One step being followed; `stage` says what of it is running."""

    def __init__(self, program: Program, model: nn.Module, flow: FollowedStep) -> None:
        self.program, self.model, self.flow = program, model, flow
        self.stage = "apply"
        self.running: Running | None = None
        self.varying: Varying | None = None
        self.inputs: dict[str, Tags] = {}

    def run(self, workload: Workload, rows: int, loss: Loss) -> None:
        whole = workload.example(rows, workload.seq_len, "cpu")
        attention = whole_attention(self.program, self.model, workload, rows)
        alone = beside.copy_alone(self.program, self.model)
        enter_fake_world(self.program.mesh.world_size, 0)
        mesh = build_mesh(self.program.mesh, "cpu")
        apply(self.program, self.model, mesh)
        self.running = running = Running(self.model)
        self.varying = varying = _varying(mesh, running, self.flow)
        varying.draws, varying.apart = self.flow.draws, self.flow.apart
        self.inputs = _watch_borders(self.program, self.model, varying, self.flow)
        fake = torch_private.FakeTensors()
        with fake:
            allocate(self.model, "cpu")
            batch = shard_tokens({k: torch.empty_like(v) for k, v in whole.items()}, self.program.plan, mesh)
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                if isinstance(tensor, DTensor):
                    varying.sharded(tensor, name.rpartition(".")[0])
        whole_calls = beside.calls_alone(alone, batch)
        with FlexAttention(), fake, varying:
            with (
                self._staged("forward"),
                beside.watch_sizes(
                    self.program, whole_calls, varying, running, workload.seq_len
                ) as other_sizes,
                watch_attention(self.program, attention, whole, batch, running) as self.flow.shapes,
                watch_sequence(self.program, self.model, batch, varying) as (positions, attentions),
                watch_wholes(self.program, self.model, batch, varying) as wholes,
            ):
                # Filled while forward runs, so that what was seen before a failure is there.
                self.flow.positions, self.flow.attentions = positions, attentions
                self.flow.taken_apart = wholes.taken_apart
                output = outcome_for_loss(self.model, batch)
            self.flow.sharded_output = is_sharded(output)
            with taken_sharded(output):
                with self._staged("loss"):
                    total, _ = loss_sums(loss, output, batch)
                self.flow.wholes = wholes.reaching(total)
                self.flow.other_sizes = beside.reaching(other_sizes, varying, total)
                self.flow.loss = {a: m for a, m in varying.tags(total).items() if a in TENSOR_AXES}
                with self._staged("backward"):
                    total.backward()
        self.flow.gradients = list(_gradients(self.model, varying, self.inputs))

    @contextmanager
    def _staged(self, stage: str) -> Iterator[None]:
        self.stage = stage
        with phase(stage):
            yield

    def failure(self, error: BaseException) -> StepFailure:
        running, varying = self.running, self.varying
        where = (running.failed_with(error) or running.current) if running else ""
        text = next((line.strip() for line in str(error).splitlines() if line.strip()), "").rstrip(".")
        operator, operands = (varying.operator, varying.operands()) if varying else ("", ())
        return StepFailure(
            where,
            self.stage,
            operator,
            type(error).__name__,
            text,
            operands,
            written_at(error),
            remedy(error),
            whole_numbers_of(error, self.program.mesh.sizes["tp"], running.path_of) if running else None,
            raises_anywhere(error),
        )


def failure_alone(
    program: Program, model: nn.Module, workload: Workload, loss: Loss, fold: bool = True
) -> StepFailure | None:
    """Why the model does not run forward and backward on fake tensors with nothing applied to it; None where it does."""
    alone = dataclasses.replace(program, applications=(), mesh=Mesh({}), stages=None)
    flow = follow(alone, model, workload, loss, fold=fold)
    failure = flow.failure
    return failure and dataclasses.replace(failure, module=next(flow.paths(failure.module)))


def _without_data_axes(program: Program) -> Program:
    """The program on the axes that are followed: of a pipeline the whole model, since stages compute what it does."""
    sizes = {**program.mesh.sizes, **dict.fromkeys((*BATCH_AXES, "pp"), 1)}
    ep = math.gcd(program.mesh.ep, Mesh(sizes).replica)
    kept = (a for a in program if a.slot in FOLLOWED and (a.slot != "experts" or ep > 1))
    mesh = Mesh(sizes, program.mesh.spans, ep=ep)
    return dataclasses.replace(program, mesh=mesh, applications=tuple(map(without_cast, kept)), stages=None)


def _varying(mesh: DeviceMesh, running: Running, flow: FollowedStep) -> Varying:
    watched = {
        ranks: axis
        for ranks, axis in axes_by_ranks(mesh).items()
        if axis in (SEQUENCE_AXIS, *TENSOR_AXES) and len(ranks) > 1
    }

    # Tokens that travel over some of the ranks of tp vary over tp.
    for each in expert_meshes(mesh):
        ranks = tuple(dist.get_process_group_ranks(each.get_group(EXPERT)))
        over = next((axis for wide, axis in watched.items() if set(ranks) < set(wide)), None)
        if over is not None:
            watched[ranks] = over

    def summed(axis: str) -> None:
        found = EqualSum(axis, running.current, current_phase())
        if axis in TENSOR_AXES and found not in flow.sums:
            flow.sums.append(found)

    return Varying(watched, lambda: running.current, summed)


def _watch_borders(
    program: Program, model: nn.Module, varying: Varying, flow: FollowedStep
) -> dict[str, Tags]:
    """Note what arrives at each module, and what its rules take it for, before they lay it out anew; and how the inputs of each
    module vary.
    """
    by_module: dict[str, list[Application]] = {}
    for a in program:
        if a.arrives and a.axis in varying.watched and a.axis in TENSOR_AXES:
            by_module.setdefault(a.module, []).append(a)
    inputs: dict[str, Tags] = {}
    for path, module in model.named_modules():
        signature = inspect.signature(module.forward)

        def before(
            _: nn.Module, args: Any, kwargs: Any, path: str = path, signature: Any = signature
        ) -> None:
            given = _by_name(signature, args, kwargs)
            seen = inputs.setdefault(path, {})
            for value in torch_private.tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    inputs[path] = seen = {**varying.tags(value), **seen}
            for a in by_module.get(path, ()):
                for name, expected in a.arrives.items():
                    value = given.get(name)
                    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                        arrival = _arrival(value, a, name, expected, varying.tags(value))
                        if arrival not in flow.arrivals:
                            flow.arrivals.append(arrival)

        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    return inputs


def _by_name(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments by name, the first by the empty name too."""
    try:
        bound = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return {}
    first = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)
    return {**bound, "": first}


def _arrival(value: torch.Tensor, a: Application, name: str, expected: Placement, tags: Tags) -> Arrival:
    axis = a.axis or ""
    lay = lays_of(value).get(axis)
    dim, packed = (lay.dim, lay.packed) if isinstance(lay, Part) else (None, "")
    return Arrival(a.module, name, axis, expected, tags.get(axis), value.ndim, dim, packed, bool(a.packed))


def _gradients(model: nn.Module, varying: Varying, inputs: dict[str, Tags]) -> Iterator[Gradient]:
    for name, param in model.named_parameters():
        gradient = param.grad
        if gradient is None:
            continue
        partial: set[str] = set()
        sharded: set[str] = set()
        if isinstance(gradient, DTensor):
            axes = gradient.device_mesh.mesh_dim_names or ()
            if EXPERT in axes:
                sharded.update(
                    TENSOR_AXES
                )  # fsdp sums the gradients of experts over all that `ep` leaves of a replica
            for axis, placement in zip(axes, gradient.placements, strict=False):
                if placement.is_partial():
                    partial.add(axis)
                elif not placement.is_replicate():
                    sharded.add(axis)
        arrived = inputs.get(name.rpartition(".")[0], {})
        yield Gradient(name, varying.tags(gradient), frozenset(partial), frozenset(sharded), arrived)
