"""A step that the host does not wait for: nothing is read before it is asked for, and a step that is not finite is left out by
the device, with those launched behind it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.optim import parameter_groups
from parallelizer.runtime.found_inf import takes_found_inf
from parallelizer.runtime.step import Batch
from parallelizer.runtime.taken_step import Step, StepNumbers
from parallelizer.simulate.rehearse.host_reads import host_reads
from tests.chosen import chosen
from tests.parity import token_loss
from tests.ranks import run_ranks
from tests.runtime.guards.planted import digest, mesh_of, parallel, parts_of
from tests.runtime.pipeline import models as staged

Kind = Callable[..., torch.optim.Optimizer]


def fused(model: nn.Module, kind: Kind = torch.optim.AdamW, **more: Any) -> torch.optim.Optimizer:
    wanted = [p for p in model.parameters() if p.requires_grad]
    groups = [{**group, "weight_decay": 0.0} for group in parameter_groups(wanted)]
    return kind(groups, lr=1e-2, fused=True, **more)


class Normed(nn.Module):
    """Statistics that a step changes, and a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


def mean_square(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return output.square().sum(), torch.tensor(float(output.shape[0]))


GOOD = {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(3))}
BAD = {"x": torch.full((8, 4), torch.nan)}

KINDS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
}


def normed(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Step]]:
    torch.manual_seed(0)
    model = Normed()
    kind, more = KINDS[name]
    optimizer = fused(model, kind, **more)

    def take(batch: Batch, after: Step | None = None, words: Tensor | None = None) -> Step:
        return pz.train_step(
            model, batch, mean_square, optimizer, 1.0, skip_nonfinite=True, words=words, after=after
        )

    return model, optimizer, take


@pytest.mark.parametrize("name", KINDS)
def test_the_host_reads_nothing_of_a_step_before_it_is_asked(name: str) -> None:
    model, optimizer, take = normed(name)
    if not hasattr(optimizer, "_step_supports_amp_scaling"):
        pytest.skip("torch 2.11 has no found_inf for Adagrad")
    take(GOOD)
    twin = copy.deepcopy(model)
    plain = pz.train_step(twin, GOOD, mean_square, torch.optim.SGD(twin.parameters()), 1.0)
    taken: list[Step] = []
    words = torch.tensor([7, -(2**62) - 1])
    assert host_reads(lambda: taken.append(take(GOOD, words=words)), "cpu") == {}
    assert host_reads(lambda: taken.append(take(BAD, words=words)), "cpu") == {}
    good, bad = taken
    assert good.words == bad.words == (7, -(2**62) - 1)
    assert good.skipped is None and bad.skipped is not None and not bad.skipped.follows
    assert torch.equal(good.loss, plain.loss) and torch.equal(good.grad_norm, plain.grad_norm)
    assert good.loss.dtype == plain.loss.dtype and bad.loss.isnan()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_step_that_is_left_out_leaves_everything_as_it_was(name: str, first: bool) -> None:
    """In the first step too, whose states torch would make: the host reads it."""
    model, optimizer, take = normed(name)
    if not first:
        take(GOOD)
    before = digest(model, optimizer)
    bad = take(BAD)
    follows = take(GOOD, after=bad)
    assert digest(model, optimizer) == before
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert follows.skipped is not None and follows.skipped.follows and follows.loss.isfinite()
    again = take(GOOD)
    assert again.skipped is None and digest(model, optimizer) != before
    # Neither clipped nor divided.
    scaled = torch.stack([g.norm() for g in gradients]).norm() / (2.0**-12 * 8)
    torch.testing.assert_close(scaled, again.grad_norm)
    assert torch.equal(again.loss, follows.loss)
    reference, its, take = normed(name)
    for _ in range(1 if first else 2):
        take(GOOD)
    assert digest(reference, its) == digest(model, optimizer)


def test_an_optimizer_that_cannot_leave_a_step_out_is_read_once_and_follows_too() -> None:
    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def take(batch: Batch, after: Step | None = None) -> Step:
        return pz.train_step(model, batch, mean_square, optimizer, skip_nonfinite=True, after=after)

    last = take(GOOD)
    before = digest(model, optimizer)
    last = take(BAD, last)
    follows: list[Step] = []
    assert sum(host_reads(lambda: follows.append(take(GOOD, last)), "cpu").values()) == 1
    assert follows[0].skipped is not None and follows[0].skipped.follows
    assert digest(model, optimizer) == before


def test_a_step_that_was_not_asked_to_be_left_out_has_none_behind_it() -> None:
    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters())
    plain = pz.train_step(model, GOOD, mean_square, optimizer)
    for skips in (True, False):
        with pytest.raises(ValueError, match=r"after=.* needs skip_nonfinite=True"):
            pz.train_step(model, GOOD, mean_square, optimizer, skip_nonfinite=skips, after=plain)


def test_which_optimizers_leave_a_step_out() -> None:
    device = torch.device("cpu")
    _, optimizer, take = normed("AdamW")
    take(GOOD)
    assert takes_found_inf(optimizer, device) and not takes_found_inf(optimizer, torch.device("cuda"))
    assert optimizer.__dict__.keys().isdisjoint({"found_inf"})
    # A state dict of an optimizer that was not fused says so of the groups.
    optimizer.param_groups[0]["fused"] = None
    assert not takes_found_inf(optimizer, device)
    _, optimizer, take = normed("AdamW")
    take(GOOD)
    optimizer.state.clear()
    assert not takes_found_inf(optimizer, device)


# Ranks, of which the last alone sees a NaN.


def spoilt_loss(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    total, weight = token_loss(output, batch)
    return (total * torch.nan if dist.get_rank() == dist.get_world_size() - 1 else total), weight


def llama(**sizes: int) -> tuple[nn.Module, Callable[[int], Any]]:
    mesh = mesh_of(**sizes)
    return parallel(mesh), lambda step: parts_of(mesh, seed=step)


def pipeline() -> tuple[nn.Module, Callable[[int], Any]]:
    model = staged.parallel(staged.PP2, staged.tied)
    return model, lambda step: staged.own_rows(model, step)


MESHES: dict[str, tuple[int, Callable[[], tuple[nn.Module, Callable[[int], Any]]]]] = {
    "fsdp2": (2, lambda: llama(dp_shard=2)),
    "tp2": (2, lambda: llama(tp=2)),
    "pp2": (2, pipeline),
    "hsdp2x2": (4, lambda: llama(dp_replicate=2, dp_shard=2)),
    "fsdp2_tp2": (4, lambda: llama(dp_shard=2, tp=2)),
}


def late(mesh: str, sticky: bool) -> dict[str, Any]:
    """Two steps, one that is not finite, and two that were launched before anybody looked."""
    model, batch = MESHES[mesh][1]()
    optimizer = fused(model)
    last, digests, steps = None, [], list[Step]()
    for number in range(5):
        words = torch.tensor([number + 10 * dist.get_rank()])
        loss = spoilt_loss if number == 2 else token_loss

        def take(number: int = number, loss: Any = loss, words: Tensor = words, last: Any = last) -> None:
            steps.append(
                pz.train_step(
                    model, batch(number), loss, optimizer, 0.3, skip_nonfinite=True, words=words, after=last
                )
            )

        if number == 3:
            reads = host_reads(take, "cpu")
        else:
            take()
        last = steps[-1] if sticky else None
        digests.append(digest(model, optimizer))
    return {
        "digests": digests,
        "reads": reads,
        "skipped": [None if one.skipped is None else one.skipped.follows for one in steps],
        "words": [one.words for one in steps],
        "numbers": [(one.loss.item(), one.grad_norm.item()) for one in steps],
    }


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", chosen(MESHES, ("fsdp2", "tp2", "pp2")))
def test_steps_behind_one_that_is_not_finite_on_one_rank_are_not_applied_on_any(mesh: str) -> None:
    ranks = MESHES[mesh][0]
    found = run_ranks(late, ranks, mesh, True)
    for one in found:
        assert len(set(one["digests"][1:])) == 1 and one["digests"][0] != one["digests"][1]
        assert one["skipped"] == [None, None, False, True, True]
        assert one["words"] == [(number + 10 * (ranks - 1),) for number in range(5)]
        assert str(one["numbers"]) == str(found[0]["numbers"])
        assert str(one["numbers"][2]) == "(nan, nan)"
        assert one["reads"] == {}


@pytest.mark.ranks
def test_without_after_a_step_that_is_not_finite_is_left_out_alone() -> None:
    for one in run_ranks(late, 2, "fsdp2", False):
        assert one["skipped"] == [None, None, False, None, None]
        assert one["digests"][1] == one["digests"][2]
        assert len(set(one["digests"])) == 4


class AsksTheScaler(torch.optim.SGD):
    """Older fused classes, such as apex's: GradScaler gives itself to their step, and they read no attribute."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


def test_an_optimizer_that_asks_a_grad_scaler_is_not_called_for_a_step_that_is_not_finite() -> None:
    model = Normed()
    optimizer = AsksTheScaler(model.parameters(), lr=1e-2)
    del optimizer.param_groups[0]["fused"]
    before = copy.deepcopy(model.state_dict())
    taken = pz.train_step(model, BAD, mean_square, optimizer, skip_nonfinite=True)
    assert taken.skipped is not None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


class Shrinks(torch.optim.AdamW):
    """A `step` that also changes parameters by itself."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(0.5)


def test_an_optimizer_with_a_step_of_its_own_is_not_called_for_a_step_that_is_not_finite() -> None:
    model = Normed()
    optimizer = Shrinks(model.parameters(), lr=1e-2, fused=True)
    take = functools.partial(pz.train_step, model, loss=mean_square, optimizer=optimizer, skip_nonfinite=True)
    assert take(GOOD).skipped is None  # the states are there
    before = copy.deepcopy(model.state_dict())
    assert take(BAD).skipped is not None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_an_optimizer_do_not_run_for_a_step_that_is_not_finite(every: bool, when: str) -> None:
    _, optimizer, take = normed("AdamW")
    ran: list[None] = []

    def hook(*_: Any) -> None:
        ran.append(None)

    name = f"register_optimizer_step_{when}_hook" if every else f"register_step_{when}_hook"
    handle = getattr(sys.modules[torch.optim.Optimizer.__module__] if every else optimizer, name)(hook)
    try:
        assert take(GOOD).skipped is None
        assert take(BAD).skipped is not None
    finally:
        handle.remove()
    assert len(ran) == 1
    assert takes_found_inf(optimizer, torch.device("cpu"))


def test_a_read_that_was_interrupted_can_be_repeated() -> None:
    numbers = iter([KeyboardInterrupt(), StepNumbers(torch.tensor(1.0), torch.tensor(2.0))])

    def read() -> StepNumbers:
        found = next(numbers)
        if isinstance(found, KeyboardInterrupt):
            raise found
        return found

    step = Step.unread(read, torch.tensor(0.0))
    with pytest.raises(KeyboardInterrupt):
        step.loss  # noqa: B018 - it reads
    assert (step.loss, step.grad_norm) == (1.0, 2.0)
