"""Random numbers of a parallel model: equal where ranks hold the same values, independent where they hold
parts.

Ranks of a tensor axis hold most tensors replicated, and must drop the same elements of them: their default
generators have the same seed and advance together. Ranks of the data axes and of `cp` hold other tokens:
`seed_ranks` gives them other seeds, as it does for the ranks of a pipeline, which run other layers. Tensors
that are split over a tensor axis (features between two linears, heads, the sequence of a residual stream)
need separate draws on each rank. A plain tensor does not show this;
the plan does, by the style `local-random` (Megatron-LM's model-parallel generator). Inside this style the
generator is seeded by one number of the default generator and the rank's position on the axis, and restored
afterwards. So the default generators stay equal. A checkpoint, which restores the default generator before it
recomputes, draws the same numbers again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer import torch_private
from parallelizer.mesh import batch_rank, describe, rename_axes
from parallelizer.styles.context_parallel.dropout import draw_seed
from parallelizer.styles.wrap_forward import wrap_forward

_axes: list[str] = []


def seed_ranks(mesh: DeviceMesh, seed: int, *, axes: Mapping[str, str] | None = None) -> None:
    """Seed torch's default generators: equally on ranks that have the same tokens and the same stages of a
    pipeline, independently on all others.

    On one rank, and if no axis distributes tokens, this is `torch.manual_seed(seed)`. Call it once, on
    every rank, before training. `axes` renames the axes of a DeviceMesh with other names, as in
    `rename_axes`. Raises ValueError for axes whose names are not ours.

    On GPUs, random operators on DTensors draw from these generators too from now on. By itself DTensor would give every rank
    rank 0's generator.
    """
    mesh = rename_axes(mesh, axes)
    sizes, place = describe(mesh).sizes, batch_rank(mesh)[0]
    if mesh.device_type != "cpu":  # DTensor draws from a CPU's default generator already
        torch_private.draw_from_own_generators()
    part = mesh.get_local_rank("cp") if sizes["cp"] > 1 else 0
    own = seed if place == part == 0 else derived_seed(seed, f"tokens of {place}, part {part}")
    stages = mesh.get_local_rank("pp") if sizes["pp"] > 1 else 0
    torch.manual_seed(own if stages == 0 else derived_seed(own, f"stages of rank {stages}"))


def drawing_apart() -> tuple[str, ...]:
    """The axes whose ranks draw numbers of their own in the module that is running."""
    return tuple(_axes)


def draw_apart(module: nn.Module, mesh: DeviceMesh, axis: str) -> None:
    """From now on the module's forward draws its random numbers independently on each rank of a mesh of one axis."""
    rank = mesh.get_local_rank()

    @torch.compiler.disable
    def around(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        seed = draw_seed(rank)
        _axes.append(axis)
        try:
            with _seeded(seed, _device((args, kwargs))) if seed is not None else nullcontext():
                return forward(*args, **kwargs)
        finally:
            _axes.pop()

    wrap_forward(module, around)


@contextmanager
def _seeded(seed: int, device: torch.device | None) -> Iterator[None]:
    """The default generators of the CPU and of a device seeded; as they were before behind it."""
    devices = [device] if device is not None else []
    kind = device.type if device is not None else "cuda"
    with torch.random.fork_rng(devices, device_type=kind):
        torch.default_generator.manual_seed(seed)
        if device is not None:
            with torch.get_device_module(device).device(device):
                torch.get_device_module(device).manual_seed(seed)
        yield


def _device(arguments: Any) -> torch.device | None:
    """The device that the module works on, unless it is the CPU."""
    if isinstance(arguments, torch.Tensor):
        return arguments.device if arguments.device.type not in ("cpu", "meta") else None
    inside: Any = ()
    if isinstance(arguments, dict):
        inside = arguments.values()
    elif isinstance(arguments, list | tuple):
        inside = arguments
    return next((device for one in inside if (device := _device(one)) is not None), None)


def derived_seed(seed: int, name: str) -> int:
    """A 63-bit seed from a run's seed and a module's name: the first bytes of SHA-256 of `seed:name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1
