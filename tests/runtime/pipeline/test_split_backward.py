"""A backward in two parts gives the gradients of one in a single part, on any graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parallelizer.runtime.pipeline.split_backward import backward_inputs, backward_weights

Forward = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
"""Of inputs and weights, what a stage sends."""

SIZE = 3


def _leaves(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, SIZE, SIZE)
    return [t.requires_grad_() for t in torch.randn(shape, generator=generator, dtype=torch.float64)]


def _compare(forward: Forward, inputs: int, weights: int, *, frozen: Sequence[int] = ()) -> None:
    """Both ways on leaves of the same values; the first part alone gives no weight a gradient."""
    x, w = _leaves(inputs, 1), _leaves(weights, 2)
    y, v = _leaves(inputs, 1), _leaves(weights, 2)
    for at in frozen:
        w[at].requires_grad_(False), v[at].requires_grad_(False)
    whole, split = forward(x, w), forward(y, v)
    whole = [t for t in whole if t.requires_grad]
    split = [t for t in split if t.requires_grad]
    grads = [torch.randn(t.shape, generator=torch.Generator().manual_seed(3), dtype=t.dtype) for t in whole]
    if whole:
        torch.autograd.backward(whole, grads)
        found, branches = backward_inputs(split, grads, y, [t for t in v if t.requires_grad])
    else:
        found, branches = (None,) * len(y), []
    assert all(t.grad is None for t in (*v, *y))
    for expected, got in zip(x, found, strict=True):
        assert (expected.grad is None) == (got is None)
        if got is not None:
            torch.testing.assert_close(got, expected.grad, rtol=1e-12, atol=1e-12)
    del split
    backward_weights(branches)
    for expected, got in zip(w, v, strict=True):
        assert (expected.grad is None) == (got.grad is None)
        if got.grad is not None:
            torch.testing.assert_close(got.grad, expected.grad, rtol=1e-12, atol=1e-12)


GRAPHS: dict[str, tuple[Forward, int, int]] = {
    "a chain": (lambda x, w: [((x[0] @ w[0]).tanh() @ w[1]).sin()], 1, 2),
    "a view": (lambda x, w: [(x[0] @ w[0]).view(-1).view(SIZE, SIZE)], 1, 1),
    "a weight used twice": (lambda x, w: [((x[0] @ w[0]).tanh() @ w[1]).tanh() @ w[0]], 1, 2),
    "a weight used twice in a row": (lambda x, w: [(x[0] @ w[0]).tanh() @ w[0]], 1, 1),
    "two weights that meet first": (lambda x, w: [x[0] @ (w[0] * w[1].tanh())], 1, 2),
    "a weight of two branches": (lambda x, w: [x[0] @ w[0].sin() + w[0].cos()], 1, 1),
    "an output without an input": (lambda x, w: [(x[0] + w[0]).tanh(), w[0].exp() * w[1]], 1, 2),
    "an output that only weights make, used inside": (
        lambda x, w: [(b := w[0].exp()), (x[0] @ b).tanh() @ w[1]],
        1,
        2,
    ),
    "an input that is passed on": (lambda x, w: [x[0], x[0] @ w[0], x[1]], 2, 1),
    "an input without a use": (lambda x, w: [x[0] @ w[0]], 2, 1),
    "a weight without a use": (lambda x, w: [x[0] @ w[0]], 1, 2),
    "a weight that is an output": (lambda x, w: [x[0] @ w[0], w[1]], 1, 2),
    "two inputs": (lambda x, w: [(x[0] @ w[0]) * (x[1] @ w[1]), x[1] @ w[0]], 2, 2),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_both_ways_give_the_same_gradients(name: str) -> None:
    _compare(*GRAPHS[name])


def test_a_frozen_weight_gets_no_gradient() -> None:
    _compare(lambda x, w: [((x[0] @ w[0]).tanh() @ w[1]) @ w[2]], 1, 3, frozen=[1])


def test_gradients_are_added_to_those_of_other_microbatches() -> None:
    layer = nn.Linear(SIZE, SIZE, dtype=torch.float64)
    batches = _leaves(3, 4)
    for x in batches:
        layer(x).sin().sum().backward()
    expected = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    done = [backward_inputs([layer(x).sin().sum()], None, [x], layer.parameters()) for x in batches]
    for _, branches in done:
        backward_weights(branches)
    for param, other in zip(layer.parameters(), expected, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad, other, rtol=1e-12, atol=1e-12)


OPERATORS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a @ b,
    lambda a, b: a + b,
    lambda a, b: (a * b).tanh(),
    lambda a, b: a.t().sin() @ b.view(-1).view(SIZE, SIZE),
]


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, len(OPERATORS) - 1), st.integers(0, 99), st.integers(0, 99)),
        min_size=1,
        max_size=9,
    ),
    inputs=st.integers(1, 3),
    weights=st.integers(1, 4),
    outputs=st.integers(1, 3),
)
def test_any_graph(steps: list[tuple[int, int, int]], inputs: int, weights: int, outputs: int) -> None:
    def forward(x: Sequence[Tensor], w: Sequence[Tensor]) -> list[Tensor]:
        made = [*x, *w]
        for operator, left, right in steps:
            made.append(OPERATORS[operator](made[left % len(made)], made[right % len(made)]))
        return made[-outputs:]

    _compare(forward, inputs, weights)
