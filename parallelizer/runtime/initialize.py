"""Initial values for a parallel model that was built on meta: the same on every mesh, to the bit.

Each module is initialised whole by its own `reset_parameters`, one at a time, on the CPU, from a generator
seeded by (seed, module name), and then sliced. DTensor's own random numbers do not exist on CPU and would
differ by mesh. The cost is that every rank draws every number once: the time grows with the whole model, the
memory with its largest module. If only the constructor can compute the values, the memory grows with the
whole model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from parallelizer import torch_private
from parallelizer.compiler.observe.families import initializer_of
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.plan import full_name
from parallelizer.mesh import cut_all
from parallelizer.runtime.constructor_values import filled_at, look
from parallelizer.runtime.state import state_of, uncut
from parallelizer.styles import attributes
from parallelizer.styles.packing import Packing
from parallelizer.styles.random_numbers import derived_seed
from parallelizer.styles.tied_parameters import tie, tied_names
from parallelizer.torch_private import is_persistent, twin

Initializer = Callable[[nn.Module], None]


def materialize(
    model: nn.Module,
    *,
    device: str | torch.device,
    seed: int,
    initializer: Initializer | None = None,
    whole: Callable[[], nn.Module] | None = None,
    skip_saved: bool = False,
) -> nn.Module:
    """Allocate a meta model's local shards on `device` and fill them. Returns the model.

    `initializer` fills one module's own parameters and buffers in place. The default is
    `reset_parameters()`, and for a transformers model its own initialization. `whole` builds the model with
    its values on the CPU, as its constructor makes them, from the same seed on every rank; each rank then
    takes its slices. Use it for models whose modules cannot initialize themselves, or whose constructor
    does more. Each rank needs the memory of the whole model during this time. With `skip_saved`, only
    modules with non-persistent buffers are filled, because a checkpoint contains everything else.

    No communication. Raises PlanError, with the model still on meta, if neither is given and a module with
    values has no initializer, or if the model's constructor fills parameters that its modules fill too, as
    in `self.apply(self._init_weights)`: these values would be lost. Also raises PlanError if an initializer
    leaves some values unfilled.
    """
    owners = [(path, m) for path, m in model.named_modules() if _own(m)]
    look(model)
    if initializer is None and whole is None and not skip_saved and (place := filled_at(model)) is not None:
        message = (
            f"the constructor of {type(model).__name__} fills parameters itself ({place}), and its modules' "
            "reset_parameters() would fill them otherwise"
        )
        help_text = (
            "pass whole=, a function that builds the model: whole=lambda: MyModel(...); or initializer=, which "
            "fills one module"
        )
        raise PlanError([Diagnostic("no-initializer", message, None, help_text)])
    initializer = initializer or initializer_of(model)
    if initializer is None and whole is None:
        lacking = [p for p, m in owners if not callable(getattr(m, "reset_parameters", None))]
        if lacking:
            message = f"{_called(lacking[0], model)} cannot initialize its values"
            help_text = (
                "give it a method reset_parameters(), or pass whole=, a function that builds the model"
            )
            raise PlanError([Diagnostic("no-initializer", message, None, help_text)])
    state = state_of(model)
    packed = state.packed if state else {}
    divided = {a.module: a.divided for a in state.program if a.divided} if state else {}
    donor = None if whole is None else built_whole(whole, seed)
    allocate(model, device)
    filled: set[int] = set()
    pipeline = state.pipeline if state else None
    plain = uncut(model)  # an initializer fills all parameters of a module, also those that other stages have
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        # The module of the first name fills these.
        for copy in pipeline.renamed if pipeline is not None else ():
            param = model.get_parameter(copy.here)
            if not skip_saved:
                path, _, leaf = copy.name.rpartition(".")
                full = (donor or plain).get_submodule(path)
                if donor is None:
                    full = _initialized(full, path, {}, initializer, seed)
                fill(param, full.get_parameter(leaf).data, packed.get(copy.here))
            filled.add(id(param))
        for path, module in owners:
            if skip_saved and all(is_persistent(module, n) for n, _ in module.named_buffers(recurse=False)):
                continue
            if donor is not None:
                full = donor.get_submodule(path)
                _check_filled(full, path, model)
            else:
                full = _initialized(plain.get_submodule(path), path, divided.get(path, {}), initializer, seed)
                _check_filled(full, path, model)
            for name, param in module.named_parameters(recurse=False):
                if id(param) not in filled:  # a tied one has the values of its first owner
                    fill(param, full.get_parameter(name).data, packed.get(full_name(path, name)))
                    filled.add(id(param))
            for name, buffer in module.named_buffers(recurse=False):
                buffer.copy_(full.get_buffer(name))
    return model


def _initialized(
    module: nn.Module, path: str, divided: Mapping[str, int], initializer: Initializer | None, seed: int
) -> nn.Module:
    """The module with its initial values, unsharded and on the CPU."""
    # The CPU's generator only: torch.manual_seed would change those of the devices too.
    torch.default_generator.manual_seed(derived_seed(seed, path))
    full = _whole(module, divided)
    (initializer or _reset)(full)
    return full


def built_whole(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model as `build` makes it on the CPU, from torch's, numpy's and Python's random numbers seeded by `seed`, which
    are then as they were. Floats that it does not fill are NaN.
    """
    kept, kept_numpy = random.getstate(), numpy.random.get_state()
    with _filled_with_nan(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(derived_seed(seed, ""))
        random.seed(derived_seed(seed, "python"))
        numpy.random.seed(derived_seed(seed, "numpy") % 2**32)
        try:
            return build()
        finally:
            random.setstate(kept)
            numpy.random.set_state(kept_numpy)


@contextmanager
def _filled_with_nan() -> Iterator[None]:
    """`torch.empty` gives NaN, and not what lay in memory, which is another thing on every rank."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def allocate(model: nn.Module, device: str | torch.device) -> None:
    """Give a meta model empty tensors on `device`, or on the CPU where its plan keeps them there.

    What was one parameter under several names stays one.
    """
    state, tied = state_of(model), tied_names(model)
    offloaded = {
        id(model.get_submodule(unit.module).get_parameter(name))
        for unit in (state.program.of_slot("fsdp") if state else ())
        if unit.options.get("cpu_offload")
        for name in unit.params
        if name not in unit.reasons
    }

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu" if id(tensor) in offloaded else device)

    # FSDP's units must see it, and a stage's outermost one lies around the model.
    pipeline = state.pipeline if state else None
    for module in (model,) if pipeline is None else pipeline.models.values():
        torch_private.replace_tensors(module, empty)
    for module in model.modules() if pipeline is not None else ():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own):  # no stage calls it
            torch_private.replace_tensors(module, empty)
    tie(model, tied)


def _own(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False)) or any(
        True for _ in module.buffers(recurse=False)
    )


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def _whole(module: nn.Module, divided: Mapping[str, int]) -> nn.Module:
    """The same module, unsharded, on the CPU and full of NaN: its attributes and children, its own parameters
    anew.

    `divided` has the whole values of attributes that a style has divided.
    """
    # The class that FSDP has put its own in front of.
    original = next(
        c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule)
    )
    made = twin(
        module,
        original,
        parameter=lambda p: nn.Parameter(_unfilled(p), requires_grad=p.requires_grad),
        buffer=_unfilled,
    )
    for name, value in divided.items():
        attributes.write(made, name, value)
    made.__dict__.pop("forward", None)
    return made


def _unfilled(like: torch.Tensor) -> torch.Tensor:
    if like.is_floating_point():
        return torch.full(like.shape, torch.nan, dtype=like.dtype)
    return torch.zeros(like.shape, dtype=like.dtype)


def _check_filled(whole: nn.Module, path: str, model: nn.Module) -> None:
    """What an initializer forgets would be left-over memory, different on every rank."""
    own = [*whole.named_parameters(recurse=False), *whole.named_buffers(recurse=False)]
    missed = [name for name, tensor in own if tensor.is_floating_point() and tensor.isnan().any()]
    if missed:
        message = f"the initializer of {_called(path, model)} leaves {', '.join(missed)} unfilled"
        raise PlanError(
            [
                Diagnostic(
                    "no-initializer", message, None, "let it fill every parameter and buffer of its module"
                )
            ]
        )


def _called(path: str, model: nn.Module) -> str:
    return f"{path or 'the root'} ({type(model.get_submodule(path)).__name__})"


def fill(param: torch.Tensor, full: torch.Tensor, packing: Packing | None) -> None:
    """Give a local shard, or a plain tensor, its part of the full one, which is in the original order. No communication."""
    if packing is not None:
        full = packing.pack(full)
    if isinstance(param, DTensor):
        param.to_local().copy_(local_slice(full, param.device_mesh, param.placements))
    else:
        param.copy_(full)


def local_slice(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """This rank's part of a full tensor."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return full.new_empty(0)
    for dim, (start, length) in enumerate(cut_all(full.shape, mesh, placements, coordinate)):
        full = full.narrow(dim, start, length)
    return full
