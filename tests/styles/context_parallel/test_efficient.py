"""What surrounds CUDA's memory-efficient kernels, with attention written out in float64 in their place."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch

from parallelizer import torch_private
from parallelizer.styles.context_parallel import efficient, kernels

Tensor = torch.Tensor


def written_out(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, bias: Any
) -> tuple[Tensor, Tensor]:
    assert q.size(1) == k.size(1) == v.size(1) and {t.dtype for t in (q, k, v)} == {torch.float32}
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if bias is not None:
        assert bias.shape == scores.shape and bias.stride(-2) % 16 == 0
        scores = scores + bias
    return torch.softmax(scores, -1) @ v.double(), torch.logsumexp(scores, -1)


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    (written_out(*leaves, *rest)[0] * grad.double()).sum().backward()
    return tuple(t.grad for t in leaves)


@pytest.mark.parametrize(
    ("groups", "masked", "dtype", "planned"),
    list(itertools.product((1, 2), (False, True), (torch.float32, torch.bfloat16), (False, True))),
)
def test_heads_are_shared_and_masks_aligned(
    groups: int, masked: bool, dtype: torch.dtype, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, "efficient_attention", written_out)
    monkeypatch.setattr(torch_private, "efficient_attention_backward", backward)
    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(2, 4, 5, 8, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, 4 // groups, 7, 8, generator=generator).to(dtype) for _ in range(2))
    mask = torch.zeros(2, 1, 5, 7).masked_fill_(torch.rand(2, 1, 5, 7, generator=generator) < 0.4, -1e9)
    added = mask if masked else None
    with efficient.planned() if planned else contextlib.nullcontext():
        out, lse = efficient.forward(q, k, v, False, 0.3, added)
        grads = efficient.backward(grad, q, k, v, out, lse, False, 0.3, added)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=added if added is None else added.double(), scale=0.3, enable_gqa=True
    )
    (expected * grad.double()).sum().backward()
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for found, right in zip((out, *grads), (expected, *(t.grad for t in leaves)), strict=True):
        assert found.dtype == dtype and found.shape == right.shape
        assert float((found.double() - right).detach().norm() / right.detach().norm()) < bound


def test_a_row_that_sees_nothing_is_zero_where_the_kernel_has_no_number_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 5, 8, generator=generator) for _ in range(4))
    mask = torch.rand(2, 1, 5, 5, generator=generator) < 0.6
    mask[:, :, 1] = False
    how: Any = {"is_causal": False, "scale": 0.3, "mask": mask}

    def block() -> list[Tensor]:
        out, lse = kernels.block_forward(q, k, v, **how)
        return [out, lse, *kernels.block_backward(grad, q, k, v, out, lse, **how)]

    def without_a_number(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = written_out(*args)
        assert out[:, :, 1].isnan().all()
        return out.float(), lse.float()

    on_a_cpu = block()
    monkeypatch.setattr(kernels, "_masked_kernel", lambda q, v: "efficient")
    monkeypatch.setattr(torch_private, "efficient_attention", without_a_number)
    monkeypatch.setattr(torch_private, "efficient_attention_backward", kernels._plain_backward)
    found = block()
    assert found[0][:, :, 1].abs().max() == 0 and (found[1][:, :, 1] == float("-inf")).all()
    for value, right in zip(found, on_a_cpu, strict=True):
        torch.testing.assert_close(value, right)
