"""The modes of proofs: float64 throughout, attention written out, sums in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.proof.modes import Float64, OtherOrder, PlainAttention, grouped_products, plain_attention


def norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)


def exact_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def test_a_norm_that_casts_to_float32_is_exact_under_float64() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    with Float64():
        lifted = norm(x)
    assert (norm(x) - exact_norm(x)).abs().max() > 1e-9
    assert torch.equal(lifted, exact_norm(x))


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.bfloat16),
        lambda x: x.half(),
        lambda x: x.type(torch.float32),
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: torch.zeros(3, dtype=torch.float32),
    ],
)
def test_float64_lifts_every_spelling_of_a_cast(cast: Any) -> None:
    with Float64():
        assert cast(torch.randn(3, dtype=torch.float64)).dtype == torch.float64


def test_float64_leaves_whole_numbers_alone() -> None:
    with Float64():
        assert torch.ones(2).to(torch.int32).dtype == torch.int32


def test_a_mode_is_on_while_a_checkpoint_runs_forward_again() -> None:
    gradients = []
    for function in (norm, exact_norm):
        x = torch.linspace(-1, 1, 8, dtype=torch.float64).requires_grad_()
        with Float64():
            checkpoint(function, x, use_reentrant=False).pow(3).sum().backward()
        gradients.append(x.grad)
    assert gradients[0] is not None and torch.equal(gradients[0], gradients[1])


def test_backward_under_a_mode_takes_a_gradient_and_inputs() -> None:
    x, y = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with Float64():
        (2 * x * y).backward(torch.full((3,), 5.0, dtype=torch.float64), inputs=[x])
    assert x.grad is not None and x.grad.tolist() == [10.0, 10.0, 10.0]
    assert y.grad is None


@pytest.mark.parametrize("kind", ["causal", "full", "bool mask", "float mask", "grouped", "scaled"])
def test_plain_attention_is_torchs(kind: str) -> None:
    torch.manual_seed(0)
    heads = 2 if kind == "grouped" else 4
    q, k, v = (
        torch.randn(2, 4, 5, 6).double(),
        torch.randn(2, heads, 5, 6).double(),
        torch.randn(2, heads, 5, 3).double(),
    )
    mask = torch.rand(5, 5) > 0.4
    mask[2] = False  # a row that sees nothing
    options: dict[str, Any] = {
        "causal": {"is_causal": True},
        "full": {},
        "bool mask": {"attn_mask": mask},
        "float mask": {"attn_mask": torch.randn(5, 5).double()},
        "grouped": {"enable_gqa": True, "is_causal": True},
        "scaled": {"scale": 0.3},
    }[kind]
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    with PlainAttention():
        torch.testing.assert_close(
            F.scaled_dot_product_attention(q, k, v, **options), expected, rtol=1e-12, atol=1e-13
        )


def test_plain_attention_refuses_dropout() -> None:
    with pytest.raises(PlanError, match="dropout of"):
        plain_attention(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), dropout_p=0.1)


def test_another_order_changes_bits_and_nothing_else() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(33, 40).double(), torch.randn(50, 33).double()
    right = layer(x)
    with OtherOrder():
        other = layer(x)
    assert not torch.equal(other, right)
    torch.testing.assert_close(other, right, rtol=1e-12, atol=1e-13)


FUNCTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "mask": {"mask": lambda b, h, i, j: (i >= j) & (j != 3 * b)},
    "scores": {"score_mod": lambda s, b, h, i, j: 2 * torch.tanh(s / 2) - 0.1 * h * (i - j)},
    "both": {
        "mask": lambda b, h, i, j: i > j,  # the first row sees nothing
        "score_mod": lambda s, b, h, i, j: s + TABLE[i - j],
    },
}
TABLE = torch.randn(10, dtype=torch.float64)


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_plain_flex_attention_is_torchs(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 6).double() for heads in (4, 2, 2))
    options = {"scale": 0.3, **FUNCTIONS[kind]}
    if mask := options.pop("mask", None):
        options["block_mask"] = create_block_mask(mask, 2, None, 5, 5, device="cpu")
    expected, lse = flex_attention(q, k, v, enable_gqa=True, return_lse=True, **options)
    with PlainAttention():
        # Under a mode of this proof's it can be differentiated, which FlexAttention cannot on a CPU.
        out, aux = flex_attention(
            q.requires_grad_(), k, v, enable_gqa=True, return_aux=AuxRequest(lse=True), **options
        )
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(aux.lse, lse, rtol=1e-12, atol=1e-13)
    out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(q, k, v, enable_gqa=True)


def test_products_of_groups_are_those_of_torch_s_kernel() -> None:
    """And in float64, which it does not take. The second group is empty."""
    rows, weights = torch.randn(12, 8, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    ends, mixed = torch.tensor([5, 5, 12], dtype=torch.int32), torch.randn(12, 16)
    found = []
    for compute in (F.grouped_mm, grouped_products):
        result = compute(rows, weights, offs=ends)
        found.append((result, *torch.autograd.grad((result * mixed).sum(), (rows, weights))))
    for kernel, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, kernel)
    with Float64():
        wide = F.grouped_mm(rows.double(), weights.double(), offs=ends)
    torch.testing.assert_close(wide.float(), found[0][0])
