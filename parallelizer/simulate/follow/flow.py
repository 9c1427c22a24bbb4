"""How tensors really lie, followed through one forward and backward of the compiled program on a fake world.

Data parallelism is left out, whose ranks may differ in everything until gradients are summed: what is
followed is which values vary over the axes that cut the model itself, and under context parallelism, what takes a
part of the sequence for the whole of it.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelizer import torch_private
from parallelizer.applier import apply
from parallelizer.context.buffers import shard_batch
from parallelizer.diagnostics import Span
from parallelizer.initialize import allocate
from parallelizer.mesh import build_mesh
from parallelizer.phase import current as current_phase
from parallelizer.phase import phase
from parallelizer.plan import BATCH_AXES, Mesh, Placement
from parallelizer.program import Application, Program
from parallelizer.simulate.attention_shapes import OtherShape, watch_attention, whole_attention
from parallelizer.simulate.failure import hush, remedy, written_at
from parallelizer.simulate.features import TakenApart, watch_features
from parallelizer.simulate.flex import FlexAttention
from parallelizer.simulate.layers import SHORT, Run, longest_run, shorten
from parallelizer.simulate.ledger import axes_by_ranks
from parallelizer.simulate.modules import Running
from parallelizer.simulate.parts import Part
from parallelizer.simulate.sequence import AXIS as SEQUENCE_AXIS
from parallelizer.simulate.sequence import LocalPositions, watch_sequence
from parallelizer.simulate.varying import EqualDraw, EqualSum, Operand, Tags, Varying
from parallelizer.simulate.whole import WholeNeeded, lays_of, watch_wholes
from parallelizer.simulate.whole_numbers import WholeNumbers, whole_numbers_of
from parallelizer.simulate.world import enter_fake_world
from parallelizer.step import Loss, forward
from parallelizer.styles.sizes import TENSOR_AXES
from parallelizer.vocabulary import is_sharded, plain, taken_sharded
from parallelizer.workload import Workload

FOLLOWED = ("params", "io", "attention")


@dataclass(frozen=True)
class Arrival:
    """An input that lies otherwise than its rule says. `since` is the module in which its value began to vary
    over `axis`, None if it does not vary; `lies` is the dimension that it is cut along, if that is what is wrong.
    """

    module: str
    name: str
    axis: str
    expected: Placement
    since: str | None
    lies: int | None = None


@dataclass(frozen=True)
class Unpacked:
    """What `projection` packed, handed to `module` without its parts having been taken from each other."""

    projection: str
    module: str


@dataclass(frozen=True)
class Unreduced:
    """A parameter that every rank of `axis` holds whole, and whose gradient varies over it. `since` is where its
    module's input began to vary, None if the input does not.
    """

    parameter: str
    axis: str
    since: str | None


@dataclass(frozen=True)
class Failure:
    """The step raised. `module` was running, `operator` was called last, with `operands`; `span` is the line of the
    model, `remedy` what to do if it is the model's fault, `numbers` what the module's forward read that may be sizes of
    the whole model.
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


@dataclass
class Flow:
    """What is not as it should be, each in order of execution; `loss` are the axes over which the loss varies,
    `attentions` the modules whose attention sees a part of the sequence, `shapes` those that it has in another shape than
    that of a rank's heads and rows. `folded` is the run of layers of which only
    SHORT were followed.
    """

    arrivals: list[Arrival] = field(default_factory=list)
    sums: list[EqualSum] = field(default_factory=list)
    unreduced: list[Unreduced] = field(default_factory=list)
    loss: Tags = field(default_factory=dict)
    positions: list[LocalPositions] = field(default_factory=list)
    attentions: list[str] = field(default_factory=list)
    taken_apart: list[TakenApart] = field(default_factory=list)
    unpacked: list[Unpacked] = field(default_factory=list)
    wholes: list[WholeNeeded] = field(default_factory=list)
    shapes: list[OtherShape] = field(default_factory=list)
    failure: Failure | None = None
    draws: list[EqualDraw] = field(default_factory=list)
    folded: Run | None = None
    sharded_output: bool = False
    """Whether the loss was given DTensors."""

    def paths(self, path: str) -> Iterator[str]:
        """The paths in the whole model that a path in the followed one stands for."""
        return iter((path,)) if self.folded is None else self.folded.stands_for(path)


def follow(program: Program, model: nn.Module, workload: Workload, loss: Loss) -> Flow:
    """Run one forward and backward in a fake world, which this process enters for good; the model is used
    up.
    """
    warnings.filterwarnings("ignore")  # of torch, about what a real run will say again
    run = longest_run(program, model)
    if run is not None:
        program = shorten(program, model, run, SHORT)
    rows = workload.batch_size // workload.accumulate // program.mesh.size(*BATCH_AXES)
    program = _without_data_axes(program)
    flow = Flow(folded=run)
    step = _Step(program, model, flow)
    hush()
    try:
        step.run(workload, max(1, rows), loss)
    except (Exception, SystemExit) as error:  # whatever torch, or the model, raises
        flow.failure = step.failure(error)
    return flow


class _Step:
    """One step being followed; `stage` says what of it is running."""

    def __init__(self, program: Program, model: nn.Module, flow: Flow) -> None:
        self.program, self.model, self.flow = program, model, flow
        self.stage = "apply"
        self.running: Running | None = None
        self.varying: Varying | None = None
        self.inputs: dict[str, Tags] = {}

    def run(self, workload: Workload, rows: int, loss: Loss) -> None:
        whole = workload.example(rows, workload.seq_len, "cpu")
        attention = whole_attention(self.program, self.model, workload, rows)
        enter_fake_world(self.program.mesh.world_size, 0)
        mesh = build_mesh(self.program.mesh, "cpu")
        apply(self.program, self.model, mesh)
        self.running = running = Running(self.model)
        self.varying = varying = _varying(mesh, running, self.flow)
        varying.draws = self.flow.draws
        self.inputs = _watch_borders(self.program, self.model, varying, self.flow)
        fake = torch_private.FakeTensors()
        with fake:
            allocate(self.model, "cpu")
            batch = shard_batch({k: torch.empty_like(v) for k, v in whole.items()}, self.program.plan, mesh)
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                if isinstance(tensor, DTensor):
                    varying.sharded(tensor, name.rpartition(".")[0])
        with FlexAttention(), fake, varying:
            with (
                self._staged("forward"),
                watch_attention(self.program, attention, whole, batch, running) as self.flow.shapes,
                watch_sequence(self.program, self.model, batch, varying) as (positions, attentions),
                watch_features(self.program, self.model, varying) as taken_apart,
                watch_wholes(self.program, self.model, batch, varying) as wholes,
            ):
                # Filled while forward runs, so that what was seen before a failure is there.
                self.flow.positions, self.flow.attentions = positions, attentions
                self.flow.taken_apart = taken_apart
                output = forward(self.model, batch)
            self.flow.sharded_output = is_sharded(output)
            with taken_sharded(output):
                with self._staged("loss"):
                    total, _ = map(plain, loss(output, batch))
                self.flow.wholes = wholes.reaching(total)
                self.flow.loss = {a: m for a, m in varying.tags(total).items() if a in TENSOR_AXES}
                with self._staged("backward"):
                    total.backward()
        _judge_gradients(self.model, varying, self.inputs, self.flow)

    @contextmanager
    def _staged(self, stage: str) -> Iterator[None]:
        self.stage = stage
        with phase(stage):
            yield

    def failure(self, error: BaseException) -> Failure:
        running, varying = self.running, self.varying
        where = (running.failed_with(error) or running.current) if running else ""
        text = next((line.strip() for line in str(error).splitlines() if line.strip()), "").rstrip(".")
        operator, operands = (varying.operator, varying.operands()) if varying else ("", ())
        return Failure(
            where,
            self.stage,
            operator,
            type(error).__name__,
            text,
            operands,
            written_at(error),
            remedy(error),
            whole_numbers_of(error, self.program.mesh.sizes["tp"], running.path_of) if running else None,
        )


def runs_alone(program: Program, model: nn.Module, workload: Workload, loss: Loss) -> bool:
    """Whether the model runs forward and backward on fake tensors with nothing applied to it."""
    alone = dataclasses.replace(program, applications=(), mesh=Mesh({}))
    return follow(alone, model, workload, loss).failure is None


def _without_data_axes(program: Program) -> Program:
    sizes = {**program.mesh.sizes, **dict.fromkeys(BATCH_AXES, 1)}
    kept = tuple(a for a in program if a.slot in FOLLOWED)
    return dataclasses.replace(
        program, mesh=dataclasses.replace(program.mesh, sizes=sizes), applications=kept
    )


def _varying(mesh: DeviceMesh, running: Running, flow: Flow) -> Varying:
    watched = {
        ranks: axis
        for ranks, axis in axes_by_ranks(mesh).items()
        if axis in (SEQUENCE_AXIS, *TENSOR_AXES) and len(ranks) > 1
    }

    def summed(axis: str) -> None:
        found = EqualSum(axis, running.current, current_phase())
        if axis in TENSOR_AXES and found not in flow.sums:
            flow.sums.append(found)

    return Varying(watched, lambda: running.current, summed)


def _watch_borders(program: Program, model: nn.Module, varying: Varying, flow: Flow) -> dict[str, Tags]:
    """Compare what arrives at each module with what its rules say, before they lay it out anew, and note how the
    inputs of each module vary.
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
                        _compare(varying.tags(value), a, name, expected, flow)
                        _compare_dims(value, a, name, expected, varying.tags(value), flow)

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


def _compare(tags: Tags, a: Application, name: str, expected: Placement, flow: Flow) -> None:
    axis = a.axis or ""
    if (expected.kind == "replicate") == (axis in tags):
        found = Arrival(a.module, name, axis, expected, tags.get(axis))
        if found not in flow.arrivals:
            flow.arrivals.append(found)


def _compare_dims(
    value: torch.Tensor, a: Application, name: str, expected: Placement, tags: Tags, flow: Flow
) -> None:
    axis = a.axis or ""
    lay = lays_of(value).get(axis)
    if not isinstance(lay, Part) or expected.dim is None or axis not in tags:
        return
    if lay.dim != expected.dim % value.ndim:
        found = Arrival(a.module, name, axis, expected, tags[axis], lay.dim)
        if found not in flow.arrivals:
            flow.arrivals.append(found)
    elif lay.packed and not a.packed and lay.packed not in [u.projection for u in flow.unpacked]:
        flow.unpacked.append(Unpacked(lay.packed, a.module))


def _judge_gradients(model: nn.Module, varying: Varying, inputs: dict[str, Tags], flow: Flow) -> None:
    for name, param in model.named_parameters():
        gradient = param.grad
        if gradient is None:
            continue
        partial: set[str] = set()
        held_in_parts: set[str] = set()
        if isinstance(gradient, DTensor):
            axes = gradient.device_mesh.mesh_dim_names or ()
            for axis, placement in zip(axes, gradient.placements, strict=False):
                if placement.is_partial():
                    partial.add(axis)
                elif not placement.is_replicate():
                    held_in_parts.add(axis)
        tags, module = varying.tags(gradient), name.rpartition(".")[0]
        for axis in sorted(varying.watched & set(TENSOR_AXES)):
            if axis in tags and axis not in partial | held_in_parts:
                flow.unreduced.append(Unreduced(name, axis, inputs.get(module, {}).get(axis)))
            if axis in partial and axis not in tags:
                flow.sums.append(EqualSum(axis, module, "backward"))
