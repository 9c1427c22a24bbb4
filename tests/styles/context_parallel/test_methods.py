"""Every method, with and without masks, against attention written from its definition; and what each sends."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.styles.context_parallel import balance
from parallelizer.styles.context_parallel.attention import context_attention
from parallelizer.styles.context_parallel.choice import METHODS, Heads, cheapest, sent
from parallelizer.styles.context_parallel.order import Order
from parallelizer.styles.context_parallel.ulysses import fits
from tests.ranks import run_ranks
from tests.styles.context_parallel.matrix import BATCH, LIMIT, RANKS, SIZE, V_SIZE, cases, draw, worst_of
from tests.styles.context_parallel.reference import masked_attention, relative_error

Tensor = torch.Tensor
SHARE = 80
"""Of the matrix, one in so many cases runs on any one day; `python -m tests.styles.context_parallel.matrix` runs all."""


def bias_gradient(group: dist.ProcessGroup, method: str) -> float:
    """The relative error of the gradient of a learned bias, summed over the ranks."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    q, k, v, grad = draw(9, Heads(12, 12), 10 * ranks)
    bias = torch.randn(
        1, 12, 10 * ranks, 10 * ranks, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    whole = bias.clone().requires_grad_()
    (right,) = torch.autograd.grad(
        masked_attention(q, k, v, mask=whole, is_causal=False, scale=SIZE**-0.5), whole, grad
    )
    mine = bias.clone().requires_grad_()
    local = (balance.split(t, 2, ranks, rank) for t in (q, k, v))
    out = context_attention(
        *local, group=group, is_causal=False, method=method, attn_mask=balance.split(mine, 2, ranks, rank)
    )
    (found,) = torch.autograd.grad(out, mine, balance.split(grad, 2, ranks, rank))
    dist.all_reduce(found, group=group)
    return relative_error(found, right)


def bytes_sent(
    group: dist.ProcessGroup, method: str, heads: Heads, is_causal: bool, **options: Any
) -> Fraction:
    """What this rank hands to collectives for others, forward and backward, over the bytes of its keys and values."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    tensors = [t[..., :V_SIZE].bfloat16() for t in draw(4, heads, 4 * ranks)[:3]]  # heads of one size
    inputs: Any = [balance.split(t, 2, ranks, rank).detach().requires_grad_() for t in tensors]
    total = [0]

    def counted(function: Any, output: Tensor, source: Tensor, **kwargs: Any) -> Any:
        largest = max(output.numel(), source.numel()) * source.element_size()
        own = kwargs.get("input_split_sizes", [source.numel() // ranks] * ranks)[rank] * source.element_size()
        total[0] += largest - own if function is all_to_all else largest * (ranks - 1) // ranks
        return function(output, source, **kwargs)

    def passed(function: Any, operations: list[Any]) -> Any:
        total[0] += sum(p.tensor.numel() * p.tensor.element_size() for p in operations if p.op is dist.isend)
        return function(operations)

    all_to_all = dist.all_to_all_single
    before = {n: getattr(dist, n) for n in ("all_gather_single", "all_to_all_single", "batch_isend_irecv")}
    for name, function in before.items():
        setattr(dist, name, partial(passed if name == "batch_isend_irecv" else counted, function))
    try:
        context_attention(
            *inputs, group=group, is_causal=is_causal, method=method, **options
        ).sum().backward()
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
    return Fraction(total[0], sum(t.numel() * t.element_size() for t in inputs[1:]))


def cross_errors(group: dist.ProcessGroup, method: str, masked: bool) -> float:
    """Queries of one sequence, keys of another, of another length: the worst relative error."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    heads = Heads(12, 12)
    q, _, _, grad = draw(7, heads, 6 * ranks)
    _, k, v, _ = draw(8, heads, 10 * ranks)
    keys = torch.rand(BATCH, 1, 1, 10 * ranks, generator=torch.Generator().manual_seed(3)) < 0.7
    mask = keys.logical_or(torch.arange(10 * ranks) == 0) if masked else None
    inputs: Any = [t.clone().requires_grad_() for t in (q, k, v)]
    right = masked_attention(*inputs, mask=mask, is_causal=False, scale=SIZE**-0.5)
    rights = [right.detach(), *torch.autograd.grad(right, inputs, grad)]
    mine: Any = [balance.split(t, 2, ranks, rank).detach().clone().requires_grad_() for t in (q, k, v)]
    out = context_attention(*mine, group=group, is_causal=False, method=method, attn_mask=mask)
    values = (out.detach(), *torch.autograd.grad(out, mine, balance.split(grad, 2, ranks, rank)))
    return max(
        relative_error(a, balance.split(b, 2, ranks, rank)) for a, b in zip(values, rights, strict=True)
    )


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    q, k, v, _ = draw(5, Heads(8, 1), 8)
    good = torch.ones(8, 8 * 4, dtype=torch.bool)
    wrong: dict[str, dict[str, Any]] = {
        "a method": {"method": "rings", "is_causal": True},
        "heads": {"method": "ulysses", "is_causal": True},
        "local columns": {"attn_mask": good[:, :8], "is_causal": False},
        "columns": {"attn_mask": good[:, :20], "is_causal": False},
        "all rows": {"attn_mask": torch.ones(32, 32, dtype=torch.bool), "is_causal": False},
        "both": {"attn_mask": good, "is_causal": True},
        "heads of a mask": {"attn_mask": good.expand(3, 8, 32), "is_causal": False},
        "a ring that learns": {
            "attn_mask": torch.zeros(8, 32, dtype=q.dtype, requires_grad=True),
            "is_causal": False,
            "method": "ring",
        },
        "a degree": {"is_causal": True, "method": "ulysses-ring", "ulysses_degree": 3},
        "heads of a degree": {"is_causal": True, "method": "ulysses-ring", "ulysses_degree": 2},
        "a degree of none": {"is_causal": True, "method": "ring", "ulysses_degree": 2},
        "an order": {"order": Order(2), "is_causal": True},
    }
    messages = {}
    for name, options in wrong.items():
        try:
            context_attention(q, k, v, group=group, **options)
        except ValueError as error:
            messages[name] = str(error)
    return messages


def on_four_ranks() -> Any:
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}
    found: dict[Any, Any] = {}
    for ranks, group in groups.items():
        if dist.get_rank() >= ranks:
            continue
        for method, masked in itertools.product(METHODS, (False, True)):
            found["cross", ranks, method, masked] = cross_errors(group, method, masked)
        for method in ("all-gather", "ulysses"):
            found["bias", ranks, method] = bias_gradient(group, method)
        for method, heads, is_causal in itertools.product(
            METHODS, (Heads(12, 12), Heads(8, 4)), (True, False)
        ):
            if ranks > 1 and (method != "ulysses" or fits(*heads, ranks)):
                found["bytes", ranks, method, heads, is_causal] = bytes_sent(group, method, heads, is_causal)
        if ranks > 1:
            found["bytes", ranks, "kept"] = bytes_sent(
                group, "all-gather", Heads(8, 4), True, keep_gathered=True
            )
    found["refusals"] = refusals(groups[4])
    return found


@pytest.fixture(scope="module")
def everything() -> list[dict[Any, Any]]:
    return run_ranks(on_four_ranks, 4)


@pytest.mark.ranks
def test_outputs_and_gradients_are_those_of_the_whole_sequence() -> None:
    chosen = cases()[::SHARE]
    worst = worst_of(chosen)
    assert len(chosen) >= len(cases()) // SHARE > 70
    assert not {case: error for case, error in worst.items() if not error < LIMIT}


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["all-gather", "ulysses"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_learned_bias_has_its_gradient(ranks: int, method: str, everything: list[dict[Any, Any]]) -> None:
    assert everything[0]["bias", ranks, method] < 1e-12


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", RANKS)
def test_keys_of_another_sequence(ranks: int, everything: list[dict[Any, Any]]) -> None:
    for rank in range(ranks):
        cross = {key: worst for key, worst in everything[rank].items() if key[:2] == ("cross", ranks)}
        assert len(cross) == 2 * len(METHODS) and max(cross.values()) < 1e-12, cross


@pytest.mark.ranks
def test_every_method_sends_what_the_closed_form_says(everything: list[dict[Any, Any]]) -> None:
    counted = 0
    for rank, found in enumerate(everything):
        for key, share in found.items():
            if key[0] == "bytes" and key[2] != "kept":
                _, ranks, method, heads, is_causal = key
                assert share == sent(method, heads, ranks, rank, is_causal=is_causal), (rank, key)
                counted += 1
            elif key[0] == "bytes":
                assert share == sent("all-gather", Heads(8, 4), key[1], is_causal=True, kept=True)
    assert counted > 80


@pytest.mark.ranks
def test_what_cannot_be_exact_is_refused(everything: list[dict[Any, Any]]) -> None:
    messages = everything[0]["refusals"]
    assert "there is no method 'rings'" in messages["a method"]
    assert "8 query and 1 key heads cannot be dealt out to 4 ranks" in messages["heads"]
    assert "made from a local length, and the sequence has 32" in messages["local columns"]
    assert "20 columns, and the sequence 32" in messages["columns"]
    assert "32 rows (all rows; list it" in messages["all rows"]
    assert "exclude each other" in messages["both"]
    assert "does not fit queries" in messages["heads of a mask"]
    assert "the ring gives an attn_mask no gradient" in messages["a ring that learns"]
    assert "ulysses_degree=3 does not divide the 4 ranks" in messages["a degree"]
    assert "1 key heads cannot be dealt out to ulysses_degree=2" in messages["heads of a degree"]
    assert "not of ring" in messages["a degree of none"]
    assert "the order is of 2 ranks, and the group has 4" in messages["an order"]


@given(
    st.integers(1, 128), st.integers(1, 8), st.sampled_from([1, 2, 3, 4, 8, 16]), st.booleans(), st.booleans()
)
def test_auto_is_the_least_of_what_is_possible(
    keys: int, group: int, ranks: int, is_causal: bool, masked: bool
) -> None:
    heads = Heads(keys * group, keys)
    chosen = cheapest(heads, ranks, is_causal=is_causal, masked=masked)
    possible = [
        "all-gather",
        *(["ring", "ulysses-ring"] * (not masked)),
        *(["ulysses"] * fits(*heads, ranks)),
    ]
    assert chosen in possible
    for method in possible:
        assert sent(chosen, heads, ranks, is_causal=is_causal, masked=masked) <= sent(
            method, heads, ranks, is_causal=is_causal, masked=masked
        )


def test_at_eight_ranks_with_64_and_8_heads() -> None:
    """torch's ring sends (4W-2)K = 30K there, gradients of bf16 travelling in float32."""
    heads = Heads(64, 8)
    shares = {m: float(sent(m, heads, 8, is_causal=True)) for m in METHODS}
    assert shares == {"all-gather": 21, "ring": 21, "ulysses": 15.75, "ulysses-ring": 15.75}
    assert float(sent("all-gather", heads, 8, is_causal=True, kept=True)) == 14
