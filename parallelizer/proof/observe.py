"""One run of two steps and an evaluation, and everything of it that is compared."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from parallelizer.language.plan import Mesh
from parallelizer.mesh import batch_rank, build_mesh
from parallelizer.proof.decisions import Decisions
from parallelizer.proof.float8_experts import round_experts
from parallelizer.proof.float8_reference import round_linears
from parallelizer.proof.float8_tokens import LowPrecision, dealt_out
from parallelizer.proof.recording import Tensors, local_part, recording
from parallelizer.proof.rounding import least_norm, norm_of, terms_of
from parallelizer.proof.scene import Scene
from parallelizer.proof.slices import line
from parallelizer.proof.subject import Subject
from parallelizer.runtime.apply import apply
from parallelizer.runtime.initialize import materialize
from parallelizer.runtime.pipeline.microbatches import has_rows
from parallelizer.runtime.state import reshard, restore_buffers, state_of
from parallelizer.runtime.state_dict import whole_tensor
from parallelizer.runtime.step import forward, train_step
from parallelizer.styles.application import Program
from parallelizer.styles.context_parallel.buffers import shard_tokens, unshard
from parallelizer.styles.context_parallel.order import order_of
from parallelizer.styles.float8.torchao_private import products_in_float64
from parallelizer.torch_private import tree_map_tensors

STEPS = 2
UNCLIPPED = 1e30
"""The bound of the first step's gradient norm: clipping would let one wrong gradient scale all others."""


@dataclass
class Observation:
    """What one run computed. Lists are by step; `outputs` has the evaluation behind the steps.

    Whole tensors by parameter name: `start` (initial values), `gradients`, `parameters` (after the step),
    `states` (of the optimizer, after the last step, by `parameter:key`), and `buffers`. What a rank alone
    sees: `outputs` and `output_gradients` by module path in order of execution, `logits` of its rows, and
    `bits`, digests of the local parameters at the start and after each step, by `parameter axis=index` for
    the axes that shard it.
    """

    start: Tensors = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    parameters: list[Tensors] = field(default_factory=list)
    states: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    logits: torch.Tensor | None = None
    outputs: list[Tensors] = field(default_factory=list)
    output_gradients: list[Tensors] = field(default_factory=list)
    bits: list[dict[str, str]] = field(default_factory=list)
    by_batch: bool = False
    """Whether its tokens were dealt out as the batch says, or padded."""
    one_sided: tuple[str, ...] = ()
    """The decisions by values that took one side every time, where these were noted."""

    scenes: list[SceneSeen] = field(default_factory=list)


@dataclass
class SceneSeen:
    """The loss of a scene, and whole gradients by parameter name."""

    scene: Scene
    loss: float
    gradients: dict[str, torch.Tensor | None]


Modes = Sequence[TorchFunctionMode]


def unsharded(
    subject: Subject,
    seed: int,
    modes: Modes,
    dtype: torch.dtype,
    flip: bool = False,
    nudge: float = 0.0,
    decisions: bool = False,
    precision: LowPrecision | None = None,
) -> Observation:
    """The run of one process, with the linears that `precision` names in float8.

    `flip` turns the rows of every batch around, which changes the order of sums and nothing else. `nudge` is
    a relative error that the first step's gradients are given before the optimizer sees them. With `decisions` what is
    decided by values is noted.
    """
    with _entered(modes), default_dtype(dtype):
        model = filled(subject, seed, dtype)
        if precision is not None:
            round_linears(model, precision)
            round_experts(model, precision)
        if not decisions:
            return _observe(model, subject, seed, None, flip, nudge, precision)
        with Decisions(__file__) as taken:
            seen = _observe(model, subject, seed, None, flip, nudge, precision)
        seen.one_sided = taken.one_sided()
        return seen


def filled(subject: Subject, seed: int, dtype: torch.dtype) -> nn.Module:
    """The whole model with its values, in this process."""
    model = subject.build().to(dtype)
    if _on_meta(model):
        whole = subject.whole(model)
        materialize(model, device="cpu", seed=seed, initializer=subject.initializer, whole=whole)
    return model


def sharded(subject: Subject, program: Program, seed: int, modes: Modes, dtype: torch.dtype) -> Observation:
    """One rank's run under the program, in an initialised world of its mesh's size. Raises ModuleFailed."""
    exact = products_in_float64() if program.of_slot("precision") else nullcontext()
    with exact, _entered(modes), default_dtype(dtype):
        model, mesh = on_a_mesh(subject, program, seed, dtype)
        seen = _observe(model, subject, seed, mesh)
    return seen if subject.device == "cpu" else _on_the_cpu(seen)


def on_a_mesh(
    subject: Subject, program: Program, seed: int, dtype: torch.dtype
) -> tuple[nn.Module, DeviceMesh]:
    """A rank's part of the model with its values under the program, in an initialised world of its mesh's size."""
    mesh = build_mesh(subject.mesh, subject.device)
    model = subject.build().to(dtype)
    meta, whole = _on_meta(model), subject.whole(model)
    if not meta:
        model = model.to(subject.device)
    apply(program, model, mesh)
    if meta:
        materialize(model, device=subject.device, seed=seed, initializer=subject.initializer, whole=whole)
    return model, mesh


def _on_the_cpu(seen: Observation) -> Observation:
    return Observation(**tree_map_tensors(lambda tensor: tensor.cpu(), vars(seen)))


def _on_meta(model: nn.Module) -> bool:
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def _observe(
    model: nn.Module,
    subject: Subject,
    seed: int,
    mesh: DeviceMesh | None,
    flip: bool = False,
    nudge: float = 0.0,
    precision: LowPrecision | None = None,
) -> Observation:
    seen = Observation()
    optimizer = subject.optimizer(model)
    if nudge:
        _nudge_first_step(optimizer, nudge, subject.tokens)
    params = trained_names(model)
    start = {name: local_part(param.detach()) for name, param in params.items()} if subject.scenes else {}
    seen.start = {n: whole_tensor(p, model, n) for n, p in params.items()}
    seen.bits.append(_digests(params))
    for step in range(STEPS):
        whole = _louder(subject.batch(seed + step), subject.loud) if step else subject.batch(seed + step)
        if flip:
            whole = _flipped(whole, subject)
        parts = rank_parts(whole, subject, subject.accumulate, mesh, precision)
        seen.by_batch |= any(map(_by_batch, parts))
        with recording(model, seen.outputs, seen.output_gradients):
            done = train_step(model, parts, subject.loss, optimizer, UNCLIPPED if step == 0 else subject.clip)
        seen.losses.append(done.loss.item())
        seen.norms.append(done.grad_norm.item())
        gradients = _on_all_ranks({n: p.grad for n, p in params.items() if p.grad is not None}, params, mesh)
        seen.gradients.append(
            {n: whole_tensor(gradients[n], model, n) if n in gradients else None for n in params}
        )
        seen.parameters.append({n: whole_tensor(p, model, n) for n, p in params.items()})
        seen.bits.append(_digests(params))
        if step == 0:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(subject.loud)
    seen.states = _states(optimizer, model, mesh)
    with torch.no_grad(), recording(model, seen.outputs, seen.output_gradients):
        batch = rank_parts(subject.batch(seed), subject, 1, mesh, precision)[0]
        logits = forward(model, batch)
    if isinstance(logits, torch.Tensor):
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        seen.logits = (
            (
                _unsharded(logits, batch, mesh)
                if mesh is not None and subject.plan.batch and logits.ndim
                else logits
            )
            .detach()
            .clone()
        )
    restore_buffers(model)
    seen.buffers = {n: local_part(b.detach()) for n, b in model.named_buffers()}
    for scene in subject.scenes:
        seen.scenes.append(_played(model, subject, scene, seed, start, mesh, flip))
    return seen


def _played(
    model: nn.Module,
    subject: Subject,
    scene: Scene,
    seed: int,
    start: Tensors,
    mesh: DeviceMesh | None,
    flip: bool,
) -> SceneSeen:
    """A step from the initial parameters that the scene makes larger or smaller, and which updates nothing."""
    reshard(model)  # an evaluation has left whole parameters
    params, copies = trained_names(model), _copies(model)
    with torch.no_grad():
        for name, param in copies:
            local = param.to_local() if isinstance(param, DTensor) else param
            local.copy_(start[name] * scene.scale)
    whole = scene.batch(subject.batch(seed), subject.workload, subject.rows)
    if flip:
        whole = _flipped(whole, subject)
    still = torch.optim.SGD([p for _, p in copies if p.requires_grad], lr=0.0, foreach=False)
    done = train_step(model, rank_parts(whole, subject, subject.accumulate, mesh), subject.loss, still)
    gradients = _on_all_ranks({n: p.grad for n, p in params.items() if p.grad is not None}, params, mesh)
    return SceneSeen(
        scene,
        done.loss.item(),
        {n: whole_tensor(gradients[n], model, n).cpu() if n in gradients else None for n in params},
    )


def _flipped(batch: Mapping[str, torch.Tensor], subject: Subject) -> Tensors:
    """The batch with its rows in the other order."""
    return {k: v.flip(0) if has_rows(k, v, subject.plan, subject.rows) else v for k, v in batch.items()}


def _louder(batch: Mapping[str, torch.Tensor], factor: float) -> Tensors:
    """The batch with its numbers that are no indices multiplied."""
    return {k: v * factor if v.is_floating_point() else v for k, v in batch.items()}


def _nudge_first_step(optimizer: torch.optim.Optimizer, size: float, tokens: int) -> None:
    """Put noise of this size, relative to each gradient's own, on the gradients that the first step is made
    with; relative to all gradients where one is only rounding.
    """
    generator = torch.Generator().manual_seed(0)

    def nudge(*_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        whole = norm_of(p.grad for p in params)
        for param in params:
            noise = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            norm = param.grad.norm().item()
            if norm <= least_norm(param.dtype, terms_of(param, tokens)) * whole:
                norm = whole
            else:
                # A zero, such as the embedding of an unused token, is zero in any order of summation.
                noise *= param.grad != 0
            param.grad.add_(noise * (size * norm / max(1, param.numel()) ** 0.5))
        handle.remove()

    handle = optimizer.register_step_pre_hook(nudge)


def rank_parts(
    batch: Mapping[str, torch.Tensor],
    subject: Subject,
    parts: int,
    mesh: DeviceMesh | None,
    precision: LowPrecision | None = None,
) -> list[Tensors]:
    """This rank's rows and tokens of a global batch on its device, in the parts that gradients are accumulated over. One process
    that computes as `precision` says has tensors that know how ranks would deal them out.
    """
    index, ranks = batch_rank(mesh) if mesh is not None else (0, 1)
    rows = subject.rows // parts // ranks
    result = []
    for part in range(parts):
        first = (part * ranks + index) * rows
        local = {
            k: v[first : first + rows] if has_rows(k, v, subject.plan, subject.rows) else v
            for k, v in batch.items()
        }
        # A run of one process has no mesh, and is always on the CPU.
        device = subject.device if mesh is not None else None
        result.append(shard_tokens(local, subject.plan, mesh, device=device))
        if precision is not None:
            result[-1] = dealt_out(result[-1], subject.plan, rows, precision, subject.mesh.sizes["tp"])
    return result


def _by_batch(batch: Tensors) -> bool:
    orders = [order for tensor in batch.values() if (order := order_of(tensor)) is not None]
    return any(order.varies or order.length is not None for order in orders)


def _unsharded(logits: torch.Tensor, batch: Tensors, mesh: DeviceMesh) -> torch.Tensor:
    """Logits in their original order, and without padding."""
    like = next((tensor for tensor in batch.values() if order_of(tensor) is not None), None)
    return unshard(logits, mesh, like=like)


def _states(optimizer: torch.optim.Optimizer, model: nn.Module, mesh: DeviceMesh | None) -> Tensors:
    params, found = trained_names(model), {}
    for name, param in params.items():
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}:{key}"] = value.detach()
    states = _on_all_ranks(found, params, mesh)
    return {
        key: whole_tensor(value, model, key.partition(":")[0]) if value.ndim else value.clone()
        for key, value in states.items()
    }


def _on_all_ranks(found: Tensors, params: Mapping[str, nn.Parameter], mesh: DeviceMesh | None) -> Tensors:
    """What this rank has by parameter, with zeros for what only others have: they will gather it. Collective
    with a mesh.
    """
    if mesh is None:
        return found
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, [(key, bool(value.ndim)) for key, value in found.items()])
    wanted = dict(pair for of_rank in names for pair in of_rank if pair[0].partition(":")[0] in params)
    return {
        key: found[key]
        if key in found
        else torch.zeros_like(params[key.partition(":")[0]].detach())
        if has_dims
        else torch.zeros(())
        for key, has_dims in sorted(wanted.items())
    }


def trained_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model by the names that they have in the whole model; of a model that is cut those of this rank."""
    found: dict[str, nn.Parameter] = {}
    for name, param in _copies(model):
        found.setdefault(name, param)
    return found


def _copies(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """As `trained_names`, with every copy of a parameter that several stages of this rank hold."""
    state = state_of(model)
    shared = () if state is None or state.pipeline is None else state.pipeline.shared
    names = {one.here: one.name for one in shared}
    return [(names.get(name, name), param) for name, param in model.named_parameters()]


def joined(ranks: list[Observation], mesh: Mesh) -> list[Observation]:
    """What each rank saw, with what the other ranks of its pipeline saw of modules and parameters that it has not."""
    if mesh.sizes["pp"] == 1:
        return ranks
    return [
        _with_others(seen, [ranks[other] for other in line(mesh, rank, "pp")])
        for rank, seen in enumerate(ranks)
    ]


def _with_others(seen: Observation, others: Sequence[Observation]) -> Observation:
    def of_all(get: Callable[[Observation], dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in others:
            found |= get(one)
        return found | get(seen)

    # Only rank 0 has whole parameters, of which the ranks of its pipeline have the others.
    def of_steps(get: Callable[[Observation], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return [of_all(lambda one, at=at: get(one)[at]) for at in range(len(get(seen)))]  # type: ignore[misc]

    return dataclasses.replace(
        seen,
        start=of_all(lambda one: one.start),
        gradients=of_steps(lambda one: one.gradients),
        parameters=of_steps(lambda one: one.parameters),
        states=of_all(lambda one: one.states),
        buffers=of_all(lambda one: one.buffers),
        scenes=[
            dataclasses.replace(one, gradients=of_all(lambda other, at=at: other.scenes[at].gradients))  # type: ignore[misc]
            for at, one in enumerate(seen.scenes)
        ],
        outputs=of_steps(lambda one: one.outputs),
        output_gradients=of_steps(lambda one: one.output_gradients),
    )


def _digests(params: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """A digest of each parameter's local bits, with the coordinates of the axes that shard it: equal keys
    must have equal bits.
    """
    found = {}
    for name, param in params.items():
        where = []
        local = local_part(param.detach())
        if isinstance(param, DTensor):
            coordinate = param.device_mesh.get_coordinate() or ()
            axes = param.device_mesh.mesh_dim_names or ()
            where = [
                f"{a}={c}"
                for a, c, p in zip(axes, coordinate, param.placements, strict=True)
                if not isinstance(p, Replicate)
            ]
        bits = hashlib.sha256(
            local.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()
        ).hexdigest()
        found[" ".join([name, *where])] = bits
    return found


@contextmanager
def _entered(modes: Modes) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
