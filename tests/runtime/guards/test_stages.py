"""The guards of a run on pipelines: what ranks hold alike, and where a number that is not finite begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.runtime.guards.drift import find_drift
from parallelizer.runtime.guards.nonfinite import find_nonfinite, nonfinite
from tests.chosen import chosen
from tests.parity import token_loss
from tests.ranks import run_ranks
from tests.runtime.guards.planted import digest, spoilt
from tests.runtime.pipeline.models import (
    PP2,
    PP2_FSDP2,
    PP2_TP2,
    PP4,
    ZBV,
    Layout,
    adamw,
    own_rows,
    parallel,
    tied,
    train,
)

LAYOUTS = {"pp2": PP2, "zbv": ZBV, "pp4": PP4, "pp2_fsdp2": PP2_FSDP2, "pp2_tp2": PP2_TP2}


def trained(layout: Layout) -> tuple[nn.Module, Any]:
    model = parallel(layout, tied)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    return model, optimizer


@pytest.mark.ranks
@pytest.mark.parametrize("layout", chosen(LAYOUTS, ["pp2", "pp2_tp2"]))
def test_steps_raise_no_alarm(layout: str) -> None:
    def worker() -> object:
        model, optimizer = trained(LAYOUTS[layout])
        pz.evaluate(model, [own_rows(model, 0)], token_loss)
        return find_drift(model, optimizer)

    assert run_ranks(worker, LAYOUTS[layout].ranks) == [()] * LAYOUTS[layout].ranks


def nudge(tensor: Tensor, rank: int) -> None:
    if dist.get_rank() == rank:
        local = tensor.detach()
        (local.to_local() if isinstance(local, DTensor) else local).view(-1)[-1] += 1


def at(model: nn.Module, name: str) -> nn.Parameter:
    """A parameter, where this rank has it; else one that nothing is done to."""
    return dict(model.named_parameters()).get(name, nn.Parameter(torch.zeros(1)))


Plant = Callable[[nn.Module, Any], None]
DRIFTS: dict[str, tuple[Layout, Plant, list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]]] = {
    "a norm of the last stage": (
        PP2_TP2, lambda m, o: nudge(at(m, "layers.3.norm.weight"), 3),
        [("layers.3.norm.weight", "", (2, 3), (2, 3))],
    ),
    "a copy of a shared parameter": (
        PP2, lambda m, o: nudge(at(m, "after.weight"), 1), [("before.weight", "", (0, 1), (0, 1))],
    ),
    "its state": (
        PP2, lambda m, o: nudge(o.state[at(m, "after.weight")]["exp_avg"], 1) if dist.get_rank() == 1 else None,
        [("before.weight", "exp_avg", (0, 1), (0, 1))],
    ),
    "a copy's state that is not there": (
        PP2, lambda m, o: o.state.pop(at(m, "after.weight")) if dist.get_rank() == 1 else None,
        [("before.weight", key, (0, 1), (0, 1)) for key in ("exp_avg", "exp_avg_sq", "step")],
    ),
    "what one stage alone has": (PP2, lambda m, o: nudge(at(m, "layers.0.up.weight"), 0), []),
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("what", DRIFTS)
def test_what_differs_is_named(what: str) -> None:
    layout, plant, wanted = DRIFTS[what]

    def worker() -> Any:
        model, optimizer = trained(layout)
        plant(model, optimizer)
        return sorted((d.name, d.state, d.ranks, d.among) for d in find_drift(model, optimizer))

    assert run_ranks(worker, layout.ranks) == [wanted] * layout.ranks


SPOILT = {"first": ("layers.0.up", 0), "last": ("layers.3.down", -1)}
CASES = [
    (layout, where, way)
    for layout in ("pp2", "zbv", "pp4", "pp2_fsdp2")
    for where in SPOILT
    for way in ("forward", "backward")
]
DAILY = [
    ("pp2", "first", "forward"), ("pp2", "last", "backward"), ("zbv", "first", "backward"), ("pp4", "last", "forward"),
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("case", chosen(CASES, DAILY), ids="-".join)
def test_a_step_that_is_not_finite_is_left_out_and_its_source_is_named(case: tuple[str, str, str]) -> None:
    layout, where, way = case
    path, place = SPOILT[where]
    ranks = LAYOUTS[layout].ranks
    # The last stage of a V is on the first rank; of several data ranks the last one is spoilt.
    spoilt_rank = 0 if layout == "zbv" or (place == 0 and layout != "pp2_fsdp2") else ranks - 1
    if layout == "pp2_fsdp2" and place == 0:
        spoilt_rank = 1

    def worker() -> tuple[str, bool]:
        model = parallel(LAYOUTS[layout], tied)
        optimizer = adamw(model)
        train(model, optimizer, [0])
        before, batch = digest(model, optimizer), own_rows(model, 1)
        module = dict(model.named_modules()).get(path, model)  # on the rank that is spoilt it is there
        with spoilt(module, spoilt_rank, backward=way == "backward"):
            done = pz.train_step(model, batch, token_loss, optimizer, 1.0, skip_nonfinite=True)
            assert done.skipped is not None
            found = find_nonfinite(model, batch, token_loss, done.skipped)
        unchanged = digest(model, optimizer) == before
        after = pz.train_step(model, batch, token_loss, optimizer, 1.0, skip_nonfinite=True)
        return nonfinite(2, done, found).message, unchanged and after.skipped is None

    every = run_ranks(worker, ranks)
    assert every == [every[0]] * ranks
    message, unchanged = every[0]
    begins = f"in forward, with the output of {path} (NaN)" if way == "forward" else f"in backward of {path}"
    assert f"it begins {begins}" in message and f"on rank {spoilt_rank}" in message, message
    assert unchanged
