"""Which module is running, forward, in backward, and while a checkpoint runs the forward again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallelizer.compiler.observe.phase import phase
from parallelizer.compiler.observe.running_module import Running, within


class Watched(nn.Module):
    """Hands its input on, and notes what runs when it is reached forward and backward."""

    def __init__(self, notes: list[str], running: Callable[[], Running]) -> None:
        super().__init__()
        self.notes, self.running = notes, running
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(self.running().current)
        return _Note.apply(x * self.weight, self)


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, owner):  # type: ignore[no-untyped-def]
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.owner.notes.append("backward " + ctx.owner.running().current)
        return grad, None


class Block(nn.Module):
    """Returns what its last child returned, so that both begin their backward with one gradient."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*children)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Recomputed(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.child, x, use_reentrant=False)


def test_forward_and_backward_name_the_innermost_module() -> None:
    notes: list[str] = []
    running: list[Running] = []
    watched = [Watched(notes, lambda: running[0]) for _ in range(2)]
    model = nn.Sequential(Block(*watched), nn.Identity())
    running.append(Running(model))
    model(torch.ones(3)).sum().backward()
    inner = ["0.inner.0", "0.inner.1"]
    assert notes == inner + [f"backward {path}" for path in reversed(inner)]


def test_a_module_whose_inputs_want_no_gradient_ends_with_the_phase() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    running = Running(model)
    with phase("forward"):
        out = model(torch.ones(1, 2))
        assert running.current == ""
    with phase("backward"):
        out.sum().backward()
        assert running.current == "0"
    with phase("clip"):
        assert running.current == ""


def test_a_recomputed_module_runs_again_in_backward() -> None:
    notes: list[str] = []
    running: list[Running] = []
    model = nn.Sequential(Recomputed(Watched(notes, lambda: running[0])))
    running.append(Running(model))
    model(torch.ones(3, requires_grad=True)).sum().backward()
    # What the backward of the product needs is computed only then.
    assert notes == ["0.child", "backward 0.child", "0.child"]
    assert running[0].current == ""


def test_listeners_are_told_of_each_module_that_begins() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    running = Running(model)
    told: list[str] = []
    running.started.append(told.append)
    model(torch.ones(1, 2)).sum().backward()
    assert told == ["0", "1", "1", "0"]


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")


def test_the_innermost_module_that_raises_is_known() -> None:
    model = nn.Sequential(Block(nn.Identity(), Fails()))
    running = Running(model)
    with pytest.raises(ZeroDivisionError) as caught:
        model(torch.ones(1))
    assert running.failed_with(caught.value) == "0.inner.1"
    assert running.failed_with(ZeroDivisionError()) == ""


def test_the_end_of_a_recomputation_is_no_failure_and_keeps_nothing_alive() -> None:
    # Recomputation stops early by an exception that passes through the modules, with all their tensors in its
    # frames.
    model = nn.Sequential(Recomputed(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))))
    running = Running(model)
    seen: list[weakref.ref[Tensor]] = []
    model[0].child[1].register_forward_hook(lambda m, i, out: seen.append(weakref.ref(out)))
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert len(seen) == 2
    gc.disable()
    try:
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()
    error = RuntimeError()
    assert running.failed_with(error) == ""


def test_removed_hooks_are_gone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    running = Running(model)
    told: list[str] = []
    running.started.append(told.append)
    running.remove()
    model(torch.ones(1, 2))
    assert told == []


@pytest.mark.parametrize(
    ("path", "module", "inside"),
    [("a.b", "a", True), ("a", "a", True), ("ab", "a", False), ("a", "", True), ("a", "a.b", False)],
)
def test_within(path: str, module: str, inside: bool) -> None:
    assert within(path, module) is inside
