"""The learning-rate scheduler of a Trainer in a checkpoint.

A scheduler of torch's has lists with one element for each parameter group. How many groups there are depends on the plan and
the mesh, because parameters of different meshes are in different groups. So the names of each group's parameters are saved
too, and a group gets the elements of the saved group that had its parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.runtime.state_dict import state_tensors

STATE, GROUPS = "scheduler.pt", "scheduler_groups.json"
OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")
"""The entries of the state dicts of torch's schedulers that are lists with one element for each parameter group."""


def save_schedule(folder: Path, scheduler: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the scheduler's state, and which parameters each group has. One rank calls it."""
    torch.save(scheduler.state_dict(), folder / STATE)
    (folder / GROUPS).write_text(json.dumps(_names(model, optimizer)))


def load_schedule(folder: Path, scheduler: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill the scheduler, and set the learning rates of the optimizer's groups to those that it had.

    Raises PlanError `checkpoint-optimizer` for a group whose parameters had different learning rates.
    """
    state = torch.load(folder / STATE, weights_only=True)
    file = folder / GROUPS
    saved = json.loads(file.read_text()) if file.exists() else None
    own = _names(model, optimizer)
    scheduler.load_state_dict(_of_own_groups(state, own, saved, folder / STATE))
    rates = scheduler.get_last_lr()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # which a scheduler writes in a step only


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of each group's parameters, as a checkpoint has them."""
    names = {id(one.tensor): one.first for one in state_tensors(model).values()}
    return [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]


def _of_own_groups(
    state: Mapping[str, Any], own: Sequence[Sequence[str]], saved: Sequence[Sequence[str]] | None, place: Path
) -> dict[str, Any]:
    """The state with lists of as many elements as the optimizer has groups, also in the schedulers that it consists of."""
    found = dict(state)
    for key in OF_GROUPS:
        if isinstance(state.get(key), list):
            found[key] = _elements(state[key], own, saved, place)
    if "_schedulers" in state:
        found["_schedulers"] = [_of_own_groups(one, own, saved, place) for one in state["_schedulers"]]
    return found


def _elements(
    values: list[Any], own: Sequence[Sequence[str]], saved: Sequence[Sequence[str]] | None, place: Path
) -> list[Any]:
    if saved is None and len(values) == len(own):  # a checkpoint without names
        return values
    groups = {name: number for number, names in enumerate(saved or ()) for name in names}
    elements = []
    for names in own:
        of_names = [values[number] for number in dict.fromkeys(groups[n] for n in names if n in groups)]
        candidates = of_names or (values if names else values[:1])
        if any(value != candidates[0] for value in candidates):
            raise _mixed(names, place)
        elements.append(candidates[0])
    return elements


def _mixed(names: Sequence[str], place: Path) -> PlanError:
    first = f" of {names[0]}" if names else ""
    message = f"the parameter group{first} has parameters of several groups of the checkpoint, with different learning rates"
    help_text = "make the groups of the optimizer as in the saved run, or start from the model's weights"
    return PlanError([Diagnostic("checkpoint-optimizer", message, Span(str(place)), help_text)])
