"""One rank of a step on a real device: its kernels, allocator, streams and optimizer are real, its peers are not there."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from parallelizer import torch_private
from parallelizer.child.children import in_children
from parallelizer.mesh import build_mesh
from parallelizer.runtime.apply import apply
from parallelizer.runtime.initialize import allocate, materialize
from parallelizer.runtime.launch.gpu_rank import prepare_gpu_rank
from parallelizer.runtime.pipeline.forms import Forms
from parallelizer.runtime.step import Batch, train_step
from parallelizer.runtime.taken_step import Step
from parallelizer.simulate.fake_world import enter_fake_world
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.pipeline_step import prepare
from parallelizer.simulate.record.planned import observing, of_the_step
from parallelizer.simulate.record.trace import Recipe, local_parts, microbatch_and_forms
from parallelizer.simulate.rehearse.host_reads import host_reads
from parallelizer.simulate.rehearse.kernels import Kernels, kernels_of
from parallelizer.simulate.rehearse.peaks import Peak, peak_of
from parallelizer.simulate.rehearse.peers import stand_in_for_peers
from parallelizer.styles.application import Program
from parallelizer.styles.context_parallel.order import order_of, tagged


@dataclass(frozen=True)
class Rehearsal:
    """What one rank's steps took on one device.

    `ledger` has the collectives of the first step, those inside `compiled` modules as collectives of these modules. `peak` is
    that of a step with optimizer states. `device_seconds` and `host_seconds` are medians over the timed steps, of the device
    until it is done, and of the host until the step's call returns; on a CPU they are the same. `host_reads` are the places
    where the host waits for a value, with how often each does. `graphs` counts what `torch.compile` made: in the first step,
    and in all later ones.
    """

    rank: int
    ranks: int
    device: str
    loss: float
    grad_norm: float
    ledger: tuple[Collective, ...]
    compiled: tuple[str, ...]
    peak: Peak
    device_seconds: float
    host_seconds: float
    steps: int
    host_reads: Mapping[str, int]
    kernels: Kernels
    graphs: tuple[int, int]


def rehearse(
    program: Program,
    model: nn.Module,
    recipe: Recipe,
    *,
    rank: int = 0,
    device: str = "cpu",
    steps: int = 6,
    seed: int = 0,
    whole: Callable[[], nn.Module] | None = None,
) -> Rehearsal:
    """Run the program as `rank` on `device`, in a child of this process. `model` is on meta and left as it is.

    Five steps are run besides the `steps` that are timed, six on CUDA. `whole` builds a model that only its constructor can
    fill, whose buffers a state dict does not have. Values are finite and mean nothing: a sum over ranks is this rank's
    term. The order of collectives between ranks, links and overlap with them cannot be seen. Raises WorldError where the child
    ends without a result, for want of memory for example.
    """
    call = (_rehearsed, program, model, recipe, rank, device, steps, seed, whole)
    (found,) = in_children([call], sees_gpus=device == "cuda")
    result: Rehearsal = found
    return result


def _rehearsed(
    program: Program,
    model: nn.Module,
    recipe: Recipe,
    rank: int,
    device: str,
    steps: int,
    seed: int,
    whole: Callable[[], nn.Module] | None,
) -> Rehearsal:
    warnings.simplefilter("ignore")
    before = torch_private.compiled_graphs()  # a forked process has its parent's count
    if device == "cuda":
        prepare_gpu_rank(0, 1)
    else:
        torch.autograd.set_multithreading_enabled(False)
    enter_fake_world(program.mesh.world_size, rank)
    stand_in_for_peers(device)
    mesh = build_mesh(program.mesh, device)
    microbatch, forms = _forms(program, model, recipe)
    apply(program, model, mesh)
    pipeline = prepare(model, forms, microbatch)
    if pipeline is not None:
        pipeline.elsewhere = 1.0
    if any(_computed(module) for module in model.modules()):
        materialize(model, device=device, seed=seed, whole=whole, skip_saved=True)
    else:
        allocate(model, device)
    _draw(model, seed)
    optimizer = recipe.optimizer(model)
    parts = [_moved(part, device) for part in local_parts(recipe.workload, program, mesh)]

    def step() -> Step:
        return train_step(model, parts, recipe.loss, optimizer, recipe.clip, skip_nonfinite=True)

    with observing(program, mesh, model) as seen:
        first = step()
    if seen.failure is not None:
        raise RuntimeError(f"its collectives were not counted: {seen.failure}")
    if first.skipped is not None:
        raise RuntimeError(
            "the loss or the gradient norm of the rehearsed step is not finite, and the optimizer did not run"
        )
    loss, grad_norm = float(first.loss), float(first.grad_norm)
    graphs = torch_private.compiled_graphs() - before
    del first
    step()
    peak = peak_of(step, device, model, optimizer, parts)
    times = [_timed(step, device) for _ in range(steps)]
    reads = host_reads(step, device)
    later = torch_private.compiled_graphs() - before - graphs
    kernels = kernels_of(step, device)  # compiled modules may be compiled anew under a profiler
    return Rehearsal(
        rank,
        program.mesh.world_size,
        torch.cuda.get_device_name() if device == "cuda" else "cpu",
        loss,
        grad_norm,
        tuple(of_the_step(seen.entries)),
        tuple(seen.compiled),
        peak,
        statistics.median(t[0] for t in times),
        statistics.median(t[1] for t in times),
        steps,
        reads,
        kernels,
        (graphs, later),
    )


def _forms(program: Program, model: nn.Module, recipe: Recipe) -> tuple[Batch, Forms]:
    """A microbatch, and what the stages before would tell this rank's stages of it; nothing where the model is not cut."""
    if program.stages is None:
        return {}, {}
    mesh = build_mesh(program.mesh, "cpu")
    return microbatch_and_forms(program, model, mesh, recipe.workload, torch_private.FakeTensors())


def _computed(module: nn.Module) -> bool:
    """Whether a module has buffers that no draw can stand for, such as the tables of a rotary embedding: those that a state
    dict does not have.
    """
    return any(not torch_private.is_persistent(module, n) for n, _ in module.named_buffers(recurse=False))


@torch.no_grad()
def _draw(model: nn.Module, seed: int) -> None:
    """Values of usual sizes, drawn on the device: zeros would run faster than those of a training."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    generator = torch.Generator(device).manual_seed(seed)
    for tensor in model.parameters():
        local = torch_private.local_tensor(tensor) if hasattr(tensor, "_local_tensor") else tensor
        if local.device != device or not local.is_floating_point():
            local.fill_(1)
        elif local.ndim < 2:
            local.fill_(1.0)
        else:
            local.normal_(0, 0.02, generator=generator)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if torch_private.is_persistent(module, name):
                buffer.fill_(1)


def _moved(part: Batch, device: str) -> dict[str, torch.Tensor]:
    """A batch on the device, with what its tensors know of the order in which they were dealt out."""
    moved = {}
    for name, tensor in part.items():
        moved[name] = tensor.to(device)
        if (order := order_of(tensor)) is not None:
            tagged(moved[name], order)
    return moved


def _timed(step: Callable[[], object], device: str) -> tuple[float, float]:
    """Seconds of the device and of the host for one step."""
    if device != "cuda":
        started = time.perf_counter()
        step()
        seconds = time.perf_counter() - started
        return seconds, seconds
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    started = time.perf_counter()
    step()
    host = time.perf_counter() - started
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, host
