"""Finds the source of values that are not finite: the ranks, the gradients, and the first module.

A gradient that was summed over ranks does not show which rank's term was wrong. The step is therefore
repeated, with a check of every module's output. The result is gathered, and is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.fold import fold_paths
from parallelizer.runtime.fail_together import gathered_over_model, own_rank
from parallelizer.runtime.guards.replay import Sighting, replay
from parallelizer.runtime.guards.wording import ranks_named
from parallelizer.runtime.partial_gradients import sum_partial
from parallelizer.runtime.pipeline.shared_gradients import sum_shared
from parallelizer.runtime.random_state import RandomState
from parallelizer.runtime.redistribution import redistribute
from parallelizer.runtime.state import device_of, restore_buffers, state_of
from parallelizer.runtime.step import Batch, Loss
from parallelizer.runtime.taken_step import Skipped, Step

Where = Literal["batch", "parameter", "loss", "gradient", "source"]


@dataclass(frozen=True)
class Nonfinite:
    """One thing that is not finite on one rank.

    `where` says what `name` is: an entry of the `batch` (or "", where no token of it counts), a `parameter`, a parameter
    whose `gradient` it is, or the module that is the `source`; of a rank's own `loss` it is empty. `kind` is `NaN` or
    `infinite`. `sighting` has more of a source.
    """

    rank: int
    where: Where
    name: str
    kind: str
    sighting: Sighting | None = None


def find_nonfinite(
    model: nn.Module,
    batch: Batch | Sequence[Batch],
    loss: Loss,
    skipped: Skipped | None = None,
    *,
    later: bool = False,
) -> tuple[Nonfinite, ...]:
    """Whatever is not finite in a step that was skipped: the arguments are those of the step, and its `Step.skipped`.

    Looks at the parameters, the batch and the gradients as the step has left them, and then runs forward and backward
    again, with the step's own random numbers. Parameters, buffers and random states are left as they are; the
    gradients are freed. Only the earliest source is listed, on the ranks that have it: what it spread to is not. No
    source means that it did not happen again. `later` says that another step was run since, whose gradients are not looked
    at: those of the repetition are. Collective: every rank calls it, and gets the same.
    """
    parts: Sequence[Batch] = [batch] if isinstance(batch, Mapping) else batch
    rank = own_rank()
    found = [Nonfinite(rank, "parameter", name, kind) for name, kind in _kinds(_parameters(model))]
    for part in parts:
        found += [Nonfinite(rank, "batch", name, kind) for name, kind in _kinds(part)]
    if skipped is not None and not math.isfinite(skipped.local[0]):
        kind = "NaN" if bool(skipped.local[0].isnan()) else "infinite"
        found.append(Nonfinite(rank, "loss", "", kind))
    gradients = [] if later else _gradients(model, rank)
    source, again = _replayed(model, parts, loss, skipped.random if skipped is not None else None, later)
    found += gradients if again is None else again
    weight = float(skipped.local[1]) if skipped is not None else 1.0
    everyone = gathered_over_model(model, (rank, tuple(found), source, weight))
    everyone.sort(key=lambda one: one[0])
    listed = [one for _, own, _, _ in everyone for one in own]
    if not any(weight for *_, weight in everyone):
        listed.insert(0, Nonfinite(0, "batch", "", "NaN"))
    sources = [(rank, s) for rank, _, s, _ in everyone if s is not None]
    first = min(((s.part, s.order) for _, s in sources), default=None)
    listed += [
        Nonfinite(rank, "source", s.module, s.kind, s) for rank, s in sources if (s.part, s.order) == first
    ]
    return tuple(listed)


def _replayed(
    model: nn.Module, parts: Sequence[Batch], loss: Loss, random: RandomState | None, gradients: bool
) -> tuple[Sighting | None, list[Nonfinite] | None]:
    """The source that this rank has seen, and what is not finite of the `gradients`, if these are asked for."""
    state = state_of(model)
    there = RandomState.now(device_of(model))
    parameters = list(model.parameters())
    try:
        for param in parameters:
            param.grad = None
        way = redistribute(state.program.redistribute) if state is not None else nullcontext()
        with way:
            if random is not None:
                random.put_back()
            seen = replay(model, parts, loss)
            if not gradients:
                return seen, None
            sum_partial([p for p in parameters if p.requires_grad])
            if state is not None and state.pipeline is not None:
                sum_shared(model, state.pipeline)
            return seen, _gradients(model, own_rank())
    finally:
        there.put_back()
        restore_buffers(model)
        for param in parameters:
            param.grad = None


def _gradients(model: nn.Module, rank: int) -> list[Nonfinite]:
    there = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [Nonfinite(rank, "gradient", name, kind) for name, kind in _kinds(there)]


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


def _kinds(tensors: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, str]]:
    """The tensors of which this rank's part is not finite, by name, and how."""
    local = {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    if not local:
        return
    device = next((t.device for t in local.values() if t.device.type != "cpu"), torch.device("cpu"))
    finite = torch.stack([torch.isfinite(t).all().to(device) for t in local.values()]).tolist()
    for (name, tensor), good in zip(local.items(), finite, strict=True):
        if not good:
            yield name, "NaN" if bool(torch.isnan(tensor).any()) else "infinite"


HELP = "look at this step's data, lower optim.lr, or skip such steps: train.on_nonfinite=skip"


def nonfinite(step: int, done: Step, found: Sequence[Nonfinite], help: str = HELP) -> Diagnostic:
    """The finding `nonfinite` of the step with this number, and of what was found of it."""
    loss, norm = done.loss.item(), done.grad_norm.item()
    what = []
    if not math.isfinite(loss):
        what.append(f"the loss is {_number(loss)}")
    if not math.isfinite(norm):
        what.append(f"{'and ' if what else ''}the gradient norm {'' if what else 'is '}{_number(norm)}")
    message = f"step {step}: {' '.join(what)}: {'; '.join(_told(found))}"
    return Diagnostic("nonfinite", message, None, help)


def _told(found: Sequence[Nonfinite]) -> Iterable[str]:
    """The source first; what only follows from it last."""
    if any(one.where == "batch" and not one.name for one in found):
        yield "no token of the batch counts, on any rank"
        return
    of = {where: [one for one in found if one.where == where] for where in get_args(Where)}
    for where, noun in (("parameter", ""), ("batch", "the batch's ")):
        for kind, names, ranks in _grouped(of[where]):
            yield f"{noun}{names} {_are(names, kind)} on {ranks}"
    if of["source"]:
        for sighting in dict.fromkeys(one.sighting for one in of["source"]):
            ranks = ranks_named(one.rank for one in of["source"] if one.sighting == sighting)
            yield f"it begins {_place(sighting)} ({sighting.kind}) on {ranks}" if sighting else ""
    else:
        yield "it did not happen again on the same batch"
    for kind, _, ranks in _grouped(of["loss"]):
        yield f"the sum of the losses of {ranks} is {kind}"
    for kind, names, ranks in _grouped(of["gradient"]):
        yield f"the gradients of {names} are {kind} on {ranks}"


def _place(seen: Sighting) -> str:
    part = f", in part {seen.part + 1} of the batch" if seen.part else ""
    module = seen.module or "the model"
    if seen.where == "loss":
        return f"in the loss function{part}"
    if seen.where == "forward":
        if seen.near and seen.near != seen.module:
            return f"in forward of {module}, in what is given to {seen.near}{part}"
        return f"in forward, with the output of {module}{part}"
    if seen.parameter:
        return f"in backward, with the gradient of {seen.parameter}{part}"
    if seen.near == seen.module == "":
        return f"in backward of the loss function{part}"
    if seen.near:
        return f"in backward of {module}, in what comes back to {seen.near}{part}"
    return f"in backward of {module}{part}"


def _grouped(found: Iterable[Nonfinite]) -> Iterable[tuple[str, str, str]]:
    """Kind, folded names and ranks: names with the same ranks and kind together."""
    ranks: dict[tuple[str, str], set[int]] = {}
    for one in found:
        ranks.setdefault((one.kind, one.name), set()).add(one.rank)
    names: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (kind, name), own in ranks.items():
        names.setdefault((kind, tuple(sorted(own))), []).append(name)
    for (kind, of), some in names.items():
        yield kind, _folded(some), ranks_named(of)


def _folded(names: Sequence[str]) -> str:
    folded = fold_paths([n for n in names if n])
    more = f" and {len(folded) - 3} more" if len(folded) > 3 else ""
    return ", ".join(folded[:3]) + more


def _are(names: str, kind: str) -> str:
    return f"{'are' if any(c in names for c in '{,') else 'is'} {kind}"


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else ("infinite" if value > 0 else "minus infinity")
