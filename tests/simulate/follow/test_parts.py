"""How results lie, held to what really comes out when each rank runs on its own part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelizer.simulate.follow.parts import Call, Lay, NeedsWhole, Part, Terms, after, viewed

Tensor = torch.Tensor
RANKS = 2


class Following(TorchDispatchMode):
    """Writes on each tensor how it lies, as operators run."""

    def __init__(self, sums: bool = True) -> None:
        super().__init__()
        self.sums = sums

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        lay = after(Call(func, args, made, lambda t: getattr(t, "lies", None), self.sums))
        for tensor in made:
            tensor.lies = lay  # type: ignore[attr-defined]
        return result


def part_of(x: Tensor, dim: int, rank: int, features: bool = False) -> Tensor:
    local = x.chunk(RANKS, dim)[rank].clone()
    local.lies = Part(dim % x.ndim, local.shape[dim], features=features)  # type: ignore[attr-defined]
    return local


def joined(locals_: list[Tensor], lay: Lay) -> Tensor:
    """The whole that the ranks' results are parts or terms of."""
    if isinstance(lay, Terms):
        return functools.reduce(torch.add, locals_)
    first = locals_[0]
    size = first.shape[lay.dim]
    shape = (
        *first.shape[: lay.dim],
        lay.outer,
        lay.size,
        size // lay.outer // lay.size,
        *first.shape[lay.dim + 1 :],
    )
    return torch.cat([t.reshape(shape) for t in locals_], lay.dim + 1).flatten(lay.dim, lay.dim + 2)


def on_ranks(
    f: Callable[..., Tensor], x: Tensor, dim: int, features: bool = False
) -> tuple[list[Tensor], Lay | None]:
    found = []
    for rank in range(RANKS):
        local = part_of(x, dim, rank, features)
        with Following():
            found.append(f(local))
    return found, found[0].lies  # type: ignore[attr-defined]


def is_no_part(locals_: list[Tensor], whole: Tensor) -> bool:
    """Whether the results are the whole in none of the ways in which ranks can hold it."""
    same = [t.shape == whole.shape and torch.allclose(t, whole) for t in locals_]
    ways: list[Tensor] = [sum(locals_[1:], locals_[0])]
    ways += [torch.cat(locals_, d) for d in range(locals_[0].ndim)]
    return not all(same) and not any(w.shape == whole.shape and torch.allclose(w, whole) for w in ways)


X = torch.randn(4, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
KERNEL = torch.randn(12, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def attended(x: Tensor, heads: int, rows: int = 1) -> Tensor:
    """Attention of x over itself, its last dimension seen as that many heads, or -1 of 3 features."""
    size = x.shape[-1] // heads if heads > 0 else 3
    y = x.reshape(*x.shape[:-1], -1, size).transpose(1, 2)
    return F.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2).flatten(2)


# What runs along another dimension than the one that is cut gives each rank its part of the result.
KEPT: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "elementwise": (1, lambda x: F.gelu(x) * 2 + x.sin()),
    "elementwise with what is broadcast": (1, lambda x: x * torch.arange(12.0).double() + X[0, 0]),
    "a mean over features": (1, lambda x: x.mean(-1, keepdim=True)),
    "a mean over features that drops them": (2, lambda x: x.mean(1)),
    "layer norm": (1, lambda x: F.layer_norm(x, (12,))),
    "rms norm": (1, lambda x: F.rms_norm(x, (12,))),
    "softmax": (1, lambda x: x.softmax(-1)),
    "log softmax over dimension 0": (2, lambda x: F.log_softmax(x, 0)),
    "cumsum over another": (1, lambda x: x.cumsum(2)),
    "roll of another": (2, lambda x: x.roll(1, 1)),
    "flip of another": (2, lambda x: x.flip(0, 1)),
    "transposed": (1, lambda x: x.transpose(0, 1)),
    "permuted": (2, lambda x: x.permute(2, 0, 1)),
    "transposed matrix": (2, lambda x: x[0].t()),
    "unsqueezed and squeezed": (1, lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1)),
    "heads": (2, lambda x: x.view(4, 8, -1, 3)),
    "heads and back": (2, lambda x: x.view(4, 8, -1, 3).mul(2).flatten(2)),
    "a norm inside each head": (2, lambda x: F.rms_norm(x.view(4, 8, -1, 3), (3,)).flatten(2)),
    "tokens in a row": (1, lambda x: x.flatten(0, 1)),
    "tokens in a row, and back": (1, lambda x: x.flatten(0, 1).mul(2).view(4, -1, 12)),
    "a norm of tokens in a row": (1, lambda x: F.layer_norm(x.reshape(-1, 12), (12,))),
    "one of another dimension": (1, lambda x: x[:, :, 3]),
    "some of another dimension": (1, lambda x: x[1:3, :, 2:]),
    "parts of another dimension": (1, lambda x: torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1)),
    "a projection of tokens": (1, lambda x: x @ W),
    "a projection with bias": (1, lambda x: F.linear(x, W.t(), W[0])),
    "a product of batches": (0, lambda x: x @ x.transpose(1, 2)),
    "padding of another": (1, lambda x: F.pad(x, (1, 2))),
    "no padding": (1, lambda x: F.pad(x, (1, 2, 0, 0))),
    "stacked": (1, lambda x: torch.stack([x, 2 * x], 0)),
    "put together along another": (1, lambda x: torch.cat([x, x * 2], 2)),
    "a convolution of width 1": (1, lambda x: F.conv1d(x.transpose(1, 2), KERNEL[..., :1], groups=12)),
    "a convolution of each row": (0, lambda x: F.conv1d(x.transpose(1, 2), KERNEL, groups=12, padding=1)),
    "attention in rows of the batch": (0, lambda x: attended(x, 2)),
    "attention in heads": (2, lambda x: attended(x, -1)),
    "the largest of features": (1, lambda x: x.max(-1).values),
    "sorted features": (1, lambda x: x.sort(-1).values),
    "the best features": (1, lambda x: x.topk(3, -1).values),
    "standard deviation": (1, lambda x: x.std(-1)),
    "norm": (1, lambda x: x.norm(dim=-1)),
    "dropout": (1, lambda x: F.dropout(x, 0.5, training=False)),
    "a gate": (1, lambda x: F.silu(x[..., :6]) * x[..., 6:]),
    "changed in place": (1, lambda x: x.mul(1).add_(1).mul_(x)),
    "masked": (1, lambda x: x.masked_fill(x > 0, 0.0).where(x < -1, 1.0)),
    "expanded": (1, lambda x: x.unsqueeze(0).expand(3, -1, -1, -1).add(1)),
    "a triangle in another": (0, lambda x: x.tril()),
    "every second": (2, lambda x: x[..., 1::2]),
    "pairs turned": (2, lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)),
    "groups of channels, rows split": (0, lambda x: F.group_norm(x, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_part_gives_its_part_of_the_result(name: str) -> None:
    dim, f = KEPT[name]
    locals_, lay = on_ranks(f, X, dim)
    assert lay is not None
    assert torch.allclose(joined(locals_, lay), f(X), rtol=1e-12, atol=1e-12)


# What looks along the dimension that is cut.
NEEDED: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "a mean": (2, lambda x: x.mean(-1)),
    "a mean of all": (1, lambda x: x.mean()),
    "rms by hand": (2, lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
    "rms by a sum": (2, lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True))),
    "rms by a sum and a number": (2, lambda x: x / (x.pow(2).sum(-1, keepdim=True) + 1)),
    "rms norm": (2, lambda x: F.rms_norm(x, x.shape[-1:])),
    "layer norm": (2, lambda x: F.layer_norm(x, x.shape[-1:])),
    "layer norm of two dimensions": (1, lambda x: F.layer_norm(x, x.shape[1:])),
    "softmax": (2, lambda x: x.softmax(-1)),
    "log softmax": (1, lambda x: x.log_softmax(1)),
    "logsumexp": (2, lambda x: x.logsumexp(-1)),
    "the largest": (2, lambda x: x.amax(-1)),
    "the largest and where": (2, lambda x: x.max(-1).values),
    "the place of the largest": (2, lambda x: x.argmax(-1).double()),
    "variance": (2, lambda x: x.var(-1)),
    "norm": (2, lambda x: F.normalize(x, dim=-1)),
    "norm of all": (1, lambda x: x / x.norm()),
    "cumsum": (1, lambda x: x.cumsum(1)),
    "cumprod": (1, lambda x: x.cumprod(1)),
    "roll": (1, lambda x: x.roll(1, 1)),
    "roll of all": (1, lambda x: x.roll(1)),
    "flip": (1, lambda x: x.flip(1)),
    "sort": (2, lambda x: x.sort(-1).values),
    "the best": (2, lambda x: x.topk(3, -1).values),
    "a shift by padding": (1, lambda x: F.pad(x, (0, 0, 1, -1))),
    "a shift by slices": (1, lambda x: torch.cat([torch.zeros(4, 1, 12).double(), x[:, :-1]], 1)),
    "differences": (1, lambda x: x.diff(dim=1)),
    "the first token": (1, lambda x: x[:, 0]),
    "the last tokens": (1, lambda x: x[:, -3:]),
    "a token put before": (1, lambda x: torch.cat([X[:, :1], x], 1)),
    "halves": (1, lambda x: x.chunk(2, 1)[0]),
    "one by one": (1, lambda x: x.unbind(1)[0]),
    "of tokens in a row": (1, lambda x: x.flatten(0, 1)[:6]),
    "a mean of tokens in a row": (1, lambda x: x.flatten(0, 1).mean(0)),
    "a norm over heads together": (2, lambda x: F.rms_norm(x.view(4, 8, -1, 3).flatten(2), x.shape[-1:])),
    "a softmax over heads": (2, lambda x: x.view(4, 8, -1, 3).softmax(2)),
    "a convolution": (1, lambda x: F.conv1d(x.transpose(1, 2), KERNEL, groups=12, padding=1)),
    "average pooling": (1, lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1)),
    "pooling to one": (1, lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1)),
    "largest in a window": (1, lambda x: F.max_pool1d(x.transpose(1, 2), 3, 1, 1)),
    "a window": (1, lambda x: x.unfold(1, 3, 1).mean(-1)),
    "attention by hand": (1, lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x),
    "attention": (1, lambda x: attended(x, 2)),
    "attention within a head": (2, lambda x: F.scaled_dot_product_attention(x, x, x)),
    "a fourier transform": (1, lambda x: torch.fft.rfft(x, dim=1).abs()),
    "a triangle": (1, lambda x: x.tril()),
    "groups of channels": (1, lambda x: F.group_norm(x, 2)),
    "every third, of a run that three does not divide": (1, lambda x: x[:, ::3]),
    "a product by itself, then more": (2, lambda x: (x @ x.transpose(1, 2)).relu()),
    "a bias added to terms": (2, lambda x: x.sum(-1) + 1),
    "a bias that a product adds to terms": (2, lambda x: torch.addmm(torch.ones(8).double(), x[0], x[0].t())),
    "terms squared": (2, lambda x: x.sum(-1) ** 2),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_what_looks_along_the_cut_needs_the_whole(name: str) -> None:
    dim, f = NEEDED[name]
    with pytest.raises(NeedsWhole):
        on_ranks(f, X, dim)
    locals_ = [f(x) for x in X.chunk(RANKS, dim)]
    assert is_no_part(locals_, f(X))  # and rightly so


TERMS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "a sum": (2, lambda x: x.sum(-1)),
    "a sum of all": (1, lambda x: x.sum()),
    "a sum that is scaled": (2, lambda x: -x.sum(-1) / 3 * X[:, :, 0]),
    "a product over features": (2, lambda x: x @ x.transpose(1, 2)),
    "a product, seen otherwise": (2, lambda x: (x @ x.transpose(1, 2)).view(4, -1).unsqueeze(1).expand(4, 3, 64)),
    "a product added to a sum": (2, lambda x: torch.addmm(x[0].sum(-1), x[0], x[0].t())),
    "two sums": (2, lambda x: x.sum(-1) + x.mul(2).sum(-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", TERMS)
def test_a_sum_along_the_cut_gives_terms(name: str) -> None:
    dim, f = TERMS[name]
    locals_, lay = on_ranks(f, X, dim)
    assert lay == Terms()
    assert torch.allclose(joined(locals_, lay), f(X), rtol=1e-12, atol=1e-12)


def test_where_nothing_will_be_added_up_a_sum_needs_the_whole() -> None:
    for f in (lambda x: x.sum(1), lambda x: x.transpose(1, 2) @ x):
        with pytest.raises(NeedsWhole), Following(sums=False):
            f(part_of(X, 1, 0))


def test_features_may_be_taken_apart_and_their_places_are_unknown_then() -> None:
    for f in (lambda x: x[..., :3], lambda x: x.chunk(2, -1)[0], lambda x: torch.cat([x, x], -1)):
        assert on_ranks(f, X, 2, features=True)[1] is None
    with pytest.raises(NeedsWhole):
        on_ranks(lambda x: x.mean(-1), X, 2, features=True)


def test_an_operator_without_a_rule_makes_everything_unknown() -> None:
    for f in (
        lambda x: x[[0, 1]],
        lambda x: x.gather(0, torch.zeros_like(x).long()),
        lambda x: torch.cdist(x, x),
    ):
        with Following():
            assert getattr(f(part_of(X, 1, 0)), "lies", None) is None


def test_the_only_head_of_a_rank_cannot_be_told() -> None:
    assert viewed((4, 8, 16), (4, 8, 1, 16), Part(2, 16)) is None
    assert viewed((4, 8, 16), (4, 8, 1, 4, 4), Part(2, 16)) is None  # its only group of heads
    assert viewed((1, 8, 16), (1, 8, 2, 8), Part(1, 8)) == Part(1, 8)
    assert viewed((4, 1, 6), (4, 6), Part(1, 1)) is None


# Programs of operators in any order: what is claimed of the result is so, and what needs the whole is refused.
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "double": lambda x: x * 2,
    "silu": F.silu,
    "swap first": lambda x: x.transpose(0, 1),
    "swap last": lambda x: x.transpose(-1, -2),
    "merge": lambda x: x.flatten(0, 1),
    "merge last": lambda x: x.flatten(-2),
    "in pairs": lambda x: x.reshape(*x.shape[:-1], -1, 2),
    "pairs first": lambda x: x.reshape(-1, 2, *x.shape[1:]),
    "one more": lambda x: x.unsqueeze(1),
    "one less": lambda x: x.squeeze(),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum(0),
    "softmax": lambda x: x.softmax(-1),
    "first": lambda x: x[0],
    "rest": lambda x: x[1:],
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "square": lambda x: x @ x.transpose(-1, -2),
    "roll": lambda x: x.roll(1, 0),
    "add itself": lambda x: x + x.flip(-1),
    "stack": lambda x: torch.stack([x, x.tanh()], 1),
}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.integers(0, 3),
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6),
)
def test_what_is_claimed_of_any_program_is_so(shape: list[int], dim: int, steps: list[str]) -> None:
    dim %= len(shape)
    shape[dim] *= RANKS
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def program(x: Tensor) -> Tensor:
        for step in steps:
            if x.ndim < 2:
                break
            x = STEPS[step](x)
        return x

    try:
        whole = program(x)
    except (RuntimeError, IndexError):
        assume(False)
    try:
        locals_, lay = on_ranks(program, x, dim)
    except (NeedsWhole, RuntimeError, IndexError):
        return
    if lay is not None:
        found = joined(locals_, lay)
        # A pair may be all that a rank has, and half of the whole: a number in the program, which nothing can follow.
        assume(found.shape == whole.shape or not any("pairs" in step for step in steps))
        assert torch.allclose(found, whole, rtol=1e-9, atol=1e-9)
