"""Loading a checkpoint under any plan, on any number of ranks: checks the hashes, then reads this rank's
tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.runtime.checkpoint import folder as names
from parallelizer.runtime.checkpoint import manifest
from parallelizer.runtime.checkpoint.contents import (
    OPTIMIZER,
    Held,
    by_name,
    held_of_model,
    held_of_optimizer,
    held_random,
    trained,
    trained_everywhere,
    undealt,
)
from parallelizer.runtime.checkpoint.fit import misfits
from parallelizer.runtime.checkpoint.planning import PlannedRead
from parallelizer.runtime.checkpoint.saving import RUN, plain_failures
from parallelizer.runtime.fail_together import gathered, together
from parallelizer.runtime.state import state_of
from parallelizer.runtime.state_dict import state_tensors

METADATA = ".metadata"


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose index has been checked against its hash and read: not its numbers."""

    path: Path
    step: int
    about: Mapping[str, Any]
    metadata: Metadata
    files: Mapping[str, manifest.Stored]

    @property
    def state(self) -> dict[str, Any]:
        """What was given to `save` as `state`."""
        state: dict[str, Any] = self.about["state"]
        return state

    @property
    def mesh(self) -> dict[str, int]:
        """The axes above 1 that it was saved on."""
        mesh: dict[str, int] = self.about["mesh"]
        return mesh


def open_checkpoint(path: str | Path) -> Opened:
    """Read what a checkpoint says of itself. Raises PlanError `checkpoint-not-found`, `checkpoint-damaged`."""
    path = Path(path)
    if not (path / manifest.NAME).exists() and not (path / METADATA).exists():
        message = "there is no checkpoint"
        if path.exists():
            message = f"this {'folder' if path.is_dir() else 'file'} is no checkpoint"
        if path.suffix == names.UNFINISHED:
            message = "this checkpoint was not finished"
        help_text = "a checkpoint is a folder step_<N> with a manifest.json"
        raise PlanError([Diagnostic("checkpoint-not-found", message, Span(str(path)), help_text)])
    files = manifest.read(path)
    for name in (METADATA, RUN):
        if name not in files:
            raise manifest.damaged(path, f"its manifest does not name {name}")
    wrong = manifest.check(path, files, (METADATA, RUN))
    if wrong:
        raise PlanError(wrong)
    about = json.loads((path / RUN).read_bytes())
    metadata = dcp.FileSystemReader(path).read_metadata()  # a pickle: opened behind its hash
    return Opened(path, about["step"], about, metadata, files)


def newest_checkpoint(folder: str | Path) -> tuple[Opened | None, list[Diagnostic]]:
    """The newest complete checkpoint in a folder, or None, and warnings about newer ones that are damaged.
    Every file of it is read and hashed by one of the ranks. Collective.
    """
    passed: list[Diagnostic] = []
    listed = gathered(together(lambda: names.steps_in(Path(folder))))
    # Rank 0's word: a file system may show the ranks different lists for a while.
    for step in reversed(listed[0]):
        path = Path(folder) / names.name(step)
        try:
            opened = together(functools.partial(open_checkpoint, path))
            together(functools.partial(_check_files, opened))
            return opened, passed
        except PlanError as error:
            passed += [
                dataclasses.replace(d, help="it is passed over", severity="warning")
                for d in error.diagnostics
            ]
    return None, passed


def load_checkpoint(
    checkpoint: str | Path | Opened, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Opened:
    """Fill a model, whose memory is allocated, and its optimizer. Collective: every rank calls it.

    The ranks share the work of hashing all files before any rank reads a value; `newest_checkpoint` has
    hashed the files of the checkpoint that it returned. Random states are restored if the checkpoint was
    saved on the same mesh, and otherwise unchanged. Raises PlanError on all ranks, with model and optimizer
    unchanged, for a checkpoint that is damaged (`checkpoint-damaged`) or belongs to another run
    (`checkpoint-mismatch`, `checkpoint-dtype`, `checkpoint-optimizer`).
    """
    if isinstance(checkpoint, Opened):  # by `newest_checkpoint`, which has hashed all of it
        opened = checkpoint
    else:
        opened = together(functools.partial(open_checkpoint, checkpoint))
        together(lambda: _check_files(opened))
    together(lambda: _check_fit(opened, model, optimizer))
    together(lambda: _read(opened, model, optimizer))
    return opened


def same_mesh(opened: Opened, model: nn.Module) -> bool:
    """Whether a checkpoint was saved on the mesh that the model runs on."""
    state = state_of(model)
    sizes = state.program.mesh.every if state else {}
    return opened.mesh == {axis: size for axis, size in sizes.items() if size > 1}


def _check_files(opened: Opened) -> None:
    """This rank's part of the files. Raises PlanError."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = manifest.check(opened.path, opened.files, sorted(opened.files)[rank::ranks])
    if found:
        raise PlanError(found)


def _check_fit(opened: Opened, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    own = None if optimizer is None else trained_everywhere(model, optimizer)
    if dist.is_initialized() and dist.get_rank() > 0:
        return  # one rank says it for all
    found = misfits(model, optimizer, opened.metadata, opened.about, Span(str(opened.path)), own)
    if found:
        raise PlanError(found)


def _read(opened: Opened, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    held = held_of_model(model)
    if optimizer is not None:
        _make_states(model, optimizer, opened)
        held += held_of_optimizer(model, optimizer)
    random = held_random() if same_mesh(opened, model) else []
    stored = opened.metadata.state_dict_metadata
    copies = {name: own for name, own in by_name([*held, *random]).items() if name in stored}
    _fill(opened, {name: own[0] for name, own in copies.items()})
    for first, *others in copies.values():
        for other in others:  # it lies as the first one does
            other.local.copy_(first.local)
    for one in random:
        if one.name in stored:
            (torch.set_rng_state if one.name.endswith(".cpu") else torch.cuda.set_rng_state)(one.local)


@torch.no_grad()
def _fill(opened: Opened, held: Mapping[str, Held]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # Without collectives: each rank knows what it wants, and reads where that stands.
        reader = dcp.FileSystemReader(opened.path)
        with plain_failures():
            dcp.load({}, storage_reader=reader, planner=PlannedRead(held), no_dist=True)


def _make_states(model: nn.Module, optimizer: torch.optim.Optimizer, opened: Opened) -> None:
    """Empty states for what the checkpoint has of them: an optimizer makes its own in its first step only."""
    own = trained(state_tensors(model), optimizer)
    saved = _states_by_name(opened)
    states: dict[str, dict[str, Any]] = {name: {} for name in own}
    for name, one in own.items():
        param = one.tensor
        for key, (size, dtype) in saved.get(one.first, {}).items():
            if size == one.shape:
                states[name][key] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
            elif isinstance(param, DTensor) and size:
                raise undealt(name, key, size, Span(str(opened.path)))
            else:
                states[name][key] = torch.zeros(size, dtype=dtype)
        states[name].update(opened.about["optimizer"]["values"].get(one.first, {}))
    numbers = {
        id(param): number
        for number, param in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    optimizer.load_state_dict(
        {
            "state": {numbers[id(own[name].tensor)]: state for name, state in states.items() if state},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
    for name, state in states.items():
        for key, value in state.items():
            kept = optimizer.state[own[name].tensor].get(key)
            if isinstance(kept, torch.Tensor) and kept.dtype != value.dtype:  # it casts to the parameter's
                optimizer.state[own[name].tensor][key] = value.to(kept.device)


def _states_by_name(opened: Opened) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """The sizes and dtypes of the tensors that a checkpoint has of each parameter's state."""
    found: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
    for full, stored in opened.metadata.state_dict_metadata.items():
        if full.startswith(OPTIMIZER) and isinstance(stored, TensorStorageMetadata):
            name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
            found.setdefault(name, {})[key] = tuple(stored.size), stored.properties.dtype
    return found
